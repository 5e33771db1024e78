"""Build every plugin as TensorRT would, for one target, and print the data that TensorRT gets, as one JSON document.

Runs in its own process: kernels are compiled here, but interpreted in the process of the tests.
Usage: python -m tests.doubles.plugin_targets CAPABILITY
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import numpy as np
from dflash_plugins import compiler
from dflash_plugins import kernel_specs as uses
from dflash_plugins import registration as quick
from dflash_plugins.version import NAMESPACE, versioned

from tests.doubles import tensorrt_double as double
from tests.doubles.tensorrt_double import DataType

# gpt-oss-120b: hidden and inner size 2880, 4 of 128 experts, vocabulary 201,088, 5 taps, blocks of 10.
F, H, I4, I8, BYTE = DataType.FLOAT, DataType.BF16, DataType.INT32, DataType.INT64, DataType.INT8
SIZES = {"B": 2, "S": 10, "R": 10, "rows": 20, "pairs": 80}
VOCAB, D, E = 201_088, 2880, 128
TILES = uses.vocabulary_tiles(VOCAB)
PARTIAL = [(("rows", TILES * 128), F)] * 2 + [(("rows", TILES), F)] * 2 + [(("rows", TILES), I8)]
MATRIX = [((E, 2 * D, D // 32, 16), BYTE), ((E, 2 * D, D // 32), BYTE), ((E, 2 * D), H)]
DOWN = [((E, D, D // 32, 16), BYTE), ((E, D, D // 32), BYTE), ((E, D), H)]
LOGITS, PAIRS, GROUPS = (("B", "R", VOCAB), F), (("pairs",), I4), ((E, 3), I4)
CASES: dict[str, tuple[list[tuple[tuple[Any, ...], DataType]], dict[str, Any]]] = {
    "SampleTiles": ([LOGITS, (("B",), F), (("B",), F), (("B",), I8), (("B", "R"), I8)], {}),
    "SampleSelect": (
        [
            LOGITS,
            (("B",), F),
            (("B",), F),
            (("B",), I4),
            (("B",), F),
            (("B",), I8),
            (("B", "R"), I8),
            *PARTIAL,
        ],
        {},
    ),
    "AcceptBlock": ([(("B", "S"), I8), (("B", "R"), I8), (("B", "R"), I8)], {}),
    "HiddenStateTap5": ([(("rows", D), H)] * 5, {}),
    "MoERoute": ([(("rows", E), F)], {"k": 4}),
    "MoEGateUp": (
        [(("rows", D), H), PAIRS, GROUPS, *MATRIX],
        {"k": 4, "alpha": 1.702, "beta": 1.0, "limit": 7.0},
    ),
    "MoEDown": ([(("pairs", D), H), (("rows", 4), F), PAIRS, GROUPS, *DOWN], {}),
    "MoECombine": ([(("pairs", D), F), (("rows", D), H)], {"k": 4}),
}


def sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(SIZES.get(d, d) for d in shape)


def build(trt: Any, name: str, capability: int) -> list[dict[str, Any]]:
    """One entry per tactic."""
    inputs, attributes = CASES[name]
    exprs = trt.IExprBuilder()
    fields = trt.PluginFieldCollection([trt.PluginField(k, np.array([v])) for k, v in attributes.items()])
    creator = trt.get_plugin_registry().get_creator(versioned(name), "1", NAMESPACE)
    request = trt.QuickPluginCreationRequest.STRICT_AOT
    plugin = creator.create_plugin(versioned(name), NAMESPACE, fields, trt.TensorRTPhase.BUILD, request)
    types = plugin.get_output_data_types([t for _, t in inputs], [len(s) for s, _ in inputs])

    def symbol(d: Any) -> Any:
        return exprs.constant(d) if isinstance(d, int) else trt.IDimensionExpr(lambda env, d=d: env[d])

    made = plugin.get_output_shapes([[symbol(d) for d in s] for s, _ in inputs], [], exprs)
    shapes = [tuple(d.evaluate(SIZES) for d in shape) for shape in made]
    in_out = [
        double.described(trt, tuple(d if isinstance(d, int) else -1 for d in s), sizes(s), t)
        for s, t in inputs
    ]
    in_out += [
        double.described(trt, tuple(d if e.is_constant() else -1 for d, e in zip(s, m, strict=True)), s, t)
        for s, m, t in zip(shapes, made, types, strict=True)
    ]
    plugin.get_supported_format_combinations(in_out, len(inputs))
    plugin.configure_plugin(in_out[: len(inputs)], in_out[len(inputs) :])
    found = []
    for tactic in plugin.get_valid_tactics() or [0]:
        plugin.set_tactic(tactic)
        launch, integers = type("Launch", (), {})(), Integers()
        plugin.get_launch_params(None, in_out, len(inputs), launch, integers, exprs)
        descs = [desc.desc for desc in in_out]
        kernel, ptx = plugin.get_kernel(descs[: len(inputs)], descs[len(inputs) :])
        text = ptx.decode()
        entry = re.search(rf"\.entry {kernel}\((.*?)\n\)", text, re.S)
        assert entry is not None
        value = {k: v.expr.evaluate(SIZES) for k, v in vars(launch).items()}
        compiled = compiler.Compiled(kernel, text, value["block_x"], value["shared_mem"])
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
                "fused": len(re.findall(r"\bfma\.", text)),
                "resources": vars(compiler.resources(compiled, capability)),
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
    quick.register(tensorrt, target)
    json.dump({name: build(tensorrt, name, target) for name in CASES}, sys.stdout)
