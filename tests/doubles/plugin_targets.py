"""Build every plugin as TensorRT would, for one target, and print the data that TensorRT gets, as one JSON document.

Runs in its own process: kernels are compiled here, but interpreted in the process of the tests.
Usage: python -m tests.doubles.plugin_targets CAPABILITY
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from typing import Any

import numpy as np
from dflash_plugins import compiler, registration
from dflash_plugins import kernel_specs as uses
from dflash_plugins.plugin_table import NAMESPACE, versioned

from tests.doubles import tensorrt_double as double
from tests.doubles.tensorrt_double import DataType

# gpt-oss-120b: hidden and inner size 2880, 4 of 128 experts, vocabulary 201,088, 5 taps, blocks of 10. 64 query heads
# and 8 key heads of 64 numbers; caches of 4096 slots. Gated DeltaNet of Qwen3.5-4B: 16 key and 32 value heads of 128.
F, H, I4, I8, BYTE = DataType.FLOAT, DataType.BF16, DataType.INT32, DataType.INT64, DataType.INT8
SIZES = {"B": 2, "S": 10, "P+S": 26, "R": 10, "rows": 20, "pairs": 80, "parts": 2, "partial": 18_432}
# The largest sizes of a plan's two profiles.
PREFILL = {"B": 1, "S": 512, "P+S": 528, "R": 1, "rows": 512, "pairs": 2048, "parts": 32, "partial": 49_152}
VERIFY = {"B": 8, "S": 16, "P+S": 32, "R": 16, "rows": 128, "pairs": 512, "parts": 8, "partial": 24_576}
for each in (SIZES, PREFILL, VERIFY):
    each["products"] = each["pairs"] * uses.DOWN_PARTS
VOCAB, D, E = 201_088, 2880, 128
BLOCKS = uses.in_blocks(D)
TILES = uses.vocabulary_tiles(VOCAB)
PARTIAL = [(("rows", TILES * 128), F)] * 2 + [(("rows", TILES), F)] * 2 + [(("rows", TILES), I8)]
MATRIX = [((E, 2 * D, D // 32, 16), BYTE), ((E, 2 * D, D // 32), BYTE), ((E, 2 * D), H)]
DOWN = [((E, D, D // 32, 16), BYTE), ((E, D, D // 32), BYTE), ((E, D), H)]
LOGITS, PAIRS, GROUPS = (("B", "R", VOCAB), F), (("pairs",), I4), ((E, 3), I4)
HEADS, CACHE = (("B", 64, "S", 64), H), (("B", 8, 4096, 64), H)
ATTEND = [HEADS, CACHE, CACHE, (("B", "S"), I8), (("B", "S"), I8)]
MERGE = [(("partial", 64), F), (("partial",), F), (("partial",), F), HEADS, CACHE]
CASES: dict[str, tuple[list[tuple[tuple[Any, ...], DataType]], dict[str, Any]]] = {
    "SampleTiles": ([LOGITS, (("B",), F), (("B",), F), (("B",), I8), (("B", "R"), I8)], {}),
    "SampleSelect": (
        [
            LOGITS, (("B",), F), (("B",), F), (("B",), I4), (("B",), F), (("B",), I8), (("B", "R"), I8),
            *PARTIAL,
        ],
        {},
    ),
    "AcceptBlock": ([(("B", "S"), I8), (("B", "R"), I8), (("B", "R"), I8)], {}),
    "HiddenStateTap5": ([(("rows", D), H)] * 5, {}), "Attend": (ATTEND, {"group": 8}),
    "AttendTree": ([*ATTEND, (("B",), I8), (("B", "S", "S"), I4)], {"group": 8}),
    "MergeAttention": (MERGE, {"group": 8, "heads": 64}),
    "MergeSinkAttention": ([*MERGE, ((64,), H)], {"group": 8, "heads": 64}),
    "MoERoute": ([(("rows", E), F), (("rows", D), H)], {"k": 4}),
    "MoEGroup": ([(("rows", 4), I4), (("parts", E), I4)], {"k": 4}),
    "MoEGateUp": ([(("rows", BLOCKS), H), PAIRS, GROUPS, *MATRIX], {"k": 4, "alpha": 1.702, "beta": 1.0, "limit": 7.0}),
    "MoEDown": ([(("pairs", BLOCKS), H), (("rows", 4), F), PAIRS, GROUPS, *DOWN], {}),
    "MoECombine": ([(("products", D), F), (("rows", D), H)], {"k": 4}),
    "GatedDeltaNet": (
        [
            *((("B", "P+S", width), F) for width in (2048, 2048, 4096)),
            *((("B", "S", 64), F), (("B", 32, 128, 128), F), (("B", 16, 64), F)),
            *((("B",), I8), (("B",), I8), (("B",), F)),
        ],
        {},
    ),
}  # fmt: skip


def sizes(shape: tuple[Any, ...], known: dict[str, int]) -> tuple[int, ...]:
    return tuple(known.get(d, d) for d in shape)


class Made:
    """A plugin in a build."""

    def __init__(self, trt: Any, name: str) -> None:
        self.trt, (self.inputs, attributes) = trt, CASES[name]
        fields = trt.PluginFieldCollection([trt.PluginField(k, np.array([v])) for k, v in attributes.items()])
        creator = trt.get_plugin_registry().get_creator(versioned(name), "1", NAMESPACE)
        request = trt.QuickPluginCreationRequest.STRICT_AOT
        self.plugin = creator.create_plugin(
            versioned(name), NAMESPACE, fields, trt.TensorRTPhase.BUILD, request
        )
        self.exprs = trt.IExprBuilder()
        self.types = self.plugin.get_output_data_types(
            [t for _, t in self.inputs], [len(s) for s, _ in self.inputs]
        )

    def described(self, known: dict[str, int]) -> tuple[list[tuple[int, ...]], list[Any]]:
        """The shapes of the outputs, and the descriptions of inputs and outputs for a profile of these sizes."""
        exprs = self.exprs

        def symbol(d: Any) -> Any:
            return (
                exprs.constant(d) if isinstance(d, int) else self.trt.IDimensionExpr(lambda env, d=d: env[d])
            )

        made = self.plugin.get_output_shapes([[symbol(d) for d in s] for s, _ in self.inputs], [], exprs)
        shapes = [tuple(d.evaluate(known) for d in shape) for shape in made]
        descs = [
            double.described(self.trt, tuple(d if isinstance(d, int) else -1 for d in s), sizes(s, known), t)
            for s, t in self.inputs
        ]
        descs += [
            double.described(
                self.trt, tuple(d if e.is_constant() else -1 for d, e in zip(s, m, strict=True)), s, t
            )
            for s, m, t in zip(shapes, made, self.types, strict=True)
        ]
        self.plugin.get_supported_format_combinations(descs, len(self.inputs))
        self.plugin.configure_plugin(descs[: len(self.inputs)], descs[len(self.inputs) :])
        return shapes, descs

    def launch(self, in_out: list[Any]) -> tuple[Any, Integers, str, str]:
        """The launch, its integers, and the kernel's name and PTX, of the tactic that was set."""
        launch, integers, count = type("Launch", (), {})(), Integers(), len(self.inputs)
        self.plugin.get_launch_params(None, in_out, count, launch, integers, self.exprs)
        descs = [desc.desc for desc in in_out]
        kernel, ptx = self.plugin.get_kernel(descs[:count], descs[count:])
        return launch, integers, kernel, ptx.decode()


def kernels_by_profile(trt: Any, name: str) -> list[list[str]]:
    """Digests of the PTX that each profile gets, with the profiles in both orders.

    TensorRT asks for the launches of all profiles of a plan before it takes the kernels.
    """
    found = []
    for order in ((PREFILL, VERIFY), (VERIFY, PREFILL)):
        made = Made(trt, name)
        asked = []
        for known in order:
            _, descs = made.described(known)
            made.plugin.set_tactic((made.plugin.get_valid_tactics() or [0])[0])
            made.launch(descs)
            asked.append(descs)
        taken = []
        for descs in asked:
            count, descs = len(made.inputs), [desc.desc for desc in descs]
            taken.append(hashlib.sha256(made.plugin.get_kernel(descs[:count], descs[count:])[1]).hexdigest())
        found.append(taken)
    return found


def build(trt: Any, name: str, capability: int) -> list[dict[str, Any]]:
    """One entry per tactic."""
    case = Made(trt, name)
    inputs, plugin, types = case.inputs, case.plugin, case.types
    shapes, in_out = case.described(SIZES)
    found = []
    for tactic in plugin.get_valid_tactics() or [0]:
        plugin.set_tactic(tactic)
        launch, integers, kernel, text = case.launch(in_out)
        entry = re.search(rf"\.entry {kernel}\((.*?)\n\)", text, re.S)
        assert entry is not None
        value = {k: v.expr.evaluate(SIZES) for k, v in vars(launch).items()}
        registers, spill_bytes = compiler.resources(text, capability)
        found.append(
            {
                "tactic": tactic,
                "kernel": kernel,
                "parameters": re.findall(r"\.param \.(u\d+)", entry[1]),
                "inputs": len(inputs),
                "outputs": [[list(s), t.name] for s, t in zip(shapes, types, strict=True)],
                "integers": [e.expr.evaluate(SIZES) for e in integers],
                "grid": [value[f"grid_{axis}"] for axis in "xyz"],
                "threads": value["block_x"],
                "required_threads": re.findall(r"\.reqntid (\d+)", text),
                "version": re.findall(r"\.version (\S+)", text)[0],
                "target": re.findall(r"\.target (\w+)", text)[0],
                "products": sorted(set(re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", text))),
                "most_registers": [int(n) for n in re.findall(r"\.maxnreg (\d+)", text)],
                "fused": len(re.findall(r"\bfma\.", text)),
                "fusable": len(re.findall(r"\b(?:mul|add|sub)\.f", text)),  # by the assembler
                "registers": registers,
                "spill_bytes": spill_bytes,
                "shared_bytes": value["shared_mem"],
            }
        )
    return found


class Integers(list[Any]):
    """The object into which TensorRT has the extra arguments written."""

    def __setattr__(self, name: str, value: int) -> None:
        assert name == "nbSymExprs"
        self[:] = [None] * value


if __name__ == "__main__":
    tensorrt = double.install()
    target = int(sys.argv[1])
    registration.register(tensorrt, target)
    built = {name: build(tensorrt, name, target) for name in CASES}
    if target == 90:  # the same Python code decides for all targets
        for name, tactics in built.items():
            tactics[0]["by_profile"] = kernels_by_profile(tensorrt, name)
    json.dump(built, sys.stdout)
