"""Plugins of TensorRT-RTX: real plans without a GPU, and the launches of a plan against a stand-in of CUDA's driver."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dflash_plugins import compiler, kernels, rtx
from dflash_plugins import kernel_specs as uses
from dflash_plugins import layers as launch
from dflash_plugins.compiled import Compiled
from dflash_plugins.plugin_table import PLUGINS, Symbols, versioned

from dflash_trt.checkpoint.tensors import Checkpoint
from tests.doubles.checkpoints import make_drafter
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter
from tests.doubles.hybrid_checkpoints import make_hybrid
from tests.plugins.test_delta_net import drawn, inputs
from tests.plugins.test_moe import expected, layer

trt = pytest.importorskip("tensorrt_rtx", exc_type=ImportError)
linux = pytest.mark.skipif(sys.platform != "linux", reason="ELF")
TYPES = {torch.float32: "FLOAT", torch.bfloat16: "BF16", torch.int32: "INT32", torch.int8: "INT8"}
TYPES[torch.int64] = "INT64"


@linux
def test_a_library_is_found_by_a_name_that_its_file_lacks(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"libdflash-none\.so"):
        ctypes.CDLL("libdflash-none.so")
    (tmp_path / "other.so").write_bytes(rtx.empty_library("libdflash-none.so", needs="libc.so.6"))
    ctypes.CDLL(str(tmp_path / "other.so"))
    assert ctypes.CDLL("libdflash-none.so").getpid() == os.getpid()  # of the library that it needs


@linux
def test_a_plan_holds_the_experts_as_they_are_stored(tmp_path: Path) -> None:
    """Ampere has no arithmetic for them."""
    target = make_gpt_oss(tmp_path / "target")
    plan = built_plan(target, make_gpt_oss_drafter(tmp_path / "drafter", target, layers=1), tmp_path / "b")
    stored = [each for each in Checkpoint(target).tensors.values() if each.name.endswith("_blocks")]
    assert stored
    for tensor in stored:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            assert plan.count(file.read(tensor.nbytes)) == 1, tensor.name
    assert all(plan.count(versioned(name).encode()) for name in rtx.NAMES if name.startswith("MoE"))


@linux
def test_a_plan_holds_the_recurrence(tmp_path: Path) -> None:
    """In each of two layers, between quantized ones."""
    target = make_hybrid(
        tmp_path / "target", num_hidden_layers=3, layer_types=[*["linear_attention"] * 2, "full_attention"]
    )
    drafter = make_drafter(tmp_path / "drafter", target, block_size=6, layers=1, taps=(0, 1))
    plan = built_plan(target, drafter, tmp_path / "b", precision="target=int4")
    assert plan.count(versioned("GatedDeltaNet").encode()) >= 2


def built_plan(target: Path, drafter: Path, out: Path, **settings: str) -> bytes:
    """The target's plan for Ampere, built in a process that compiles kernels."""
    settings |= {"target": str(target), "drafter": str(drafter), "out": str(out)}
    command = [sys.executable, "-m", "dflash_trt", "build", "--engine=tensorrt-rtx", "--max-batch-size=1"]
    command += ["--compute-capability=86", "--max-seq-len=128"]
    command += [f"--{name}={value}" for name, value in settings.items()]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (out / "plans" / "sm86" / "target.plan").read_bytes()


class Interpreted:
    """The driver, with kernels that run in Triton's interpreter, on tensors that are known by their addresses."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.used: dict[str, uses.Use] = {}
        self.streams: list[int] = []

    def compile(self, use: uses.Use, capability: int) -> Compiled:
        assert capability == 89
        self.used[use.function] = use
        function = self.function(use)
        names = tuple(name for name in function.arg_names if name in use.types)
        return Compiled(use.function, "st.global", 32 * use.num_warps, 0, 1, 0, names)

    def function(self, use: uses.Use) -> Any:
        return getattr(importlib.import_module(f"{kernels.__name__}.{use.module}"), use.function)

    def context(self) -> int:
        return 7

    def load(self, compiled: Compiled) -> ctypes.c_void_p:
        assert compiled.name in self.used
        return ctypes.c_void_p(1)

    def launch(self, function: Any, compiled: Compiled, grid: Any, values: list[Any], stream: int) -> None:
        use = self.used[compiled.name]
        given = [
            self.tensors[each.value or 0] if isinstance(each, ctypes.c_void_p) else each.value
            for each in values
        ]
        self.function(use)[tuple(grid)](**dict(zip(compiled.parameters, given, strict=True)), **use.launch)
        self.streams.append(stream)


class Plan:
    """Plugins as TensorRT-RTX uses them: made, configured and written for a plan, and made again from the plan."""

    def __init__(self, driver: Interpreted) -> None:
        self.driver = driver
        creator = rtx._creator_class(trt)
        self.creators = {each.name: creator(each) for each in PLUGINS if each.name in rtx.NAMES}

    def run(self, name: str, inputs: list[torch.Tensor], **attributes: float) -> list[torch.Tensor]:
        creator = self.creators[name]
        creator.capability = 89
        fields = [rtx._field(trt, key, type(value), [value]) for key, value in attributes.items()]
        built = creator.create_plugin("node", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
        types = [getattr(trt.DataType, TYPES[each.dtype]) for each in inputs]
        described = [
            SimpleNamespace(desc=SimpleNamespace(dims=each.shape, type=kind), max=each.shape)
            for each, kind in zip(inputs, types, strict=True)
        ]
        built.configure_plugin(described, [])
        written = built.clone().get_fields_to_serialize()
        creator.capability = None
        loaded = creator.create_plugin("node", written, trt.TensorRTPhase.RUNTIME).attach_to_context(None)
        symbols = Symbols([tuple(each.shape) for each in inputs], lambda a, b: -(-a // b), min)
        dtypes = {getattr(trt.DataType, kind): dtype for dtype, kind in TYPES.items()}
        outputs = [
            torch.empty(shape, dtype=dtypes[kind])
            for (shape, _), kind in zip(
                loaded.plugin.outputs(symbols, attributes), loaded.get_output_data_types(types), strict=True
            )
        ]
        assert loaded.num_outputs == len(outputs)
        self.driver.tensors |= {each.data_ptr(): each for each in (*inputs, *outputs)}
        descs = [SimpleNamespace(dims=tuple(each.shape)) for each in inputs]
        addresses = [[each.data_ptr() for each in group] for group in (inputs, outputs)]
        loaded.enqueue(descs, [], *addresses, 0, 77)
        return outputs


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    driver = Interpreted()
    monkeypatch.setattr(compiler, "compile_kernel", driver.compile)
    monkeypatch.setattr(rtx, "_driver", lambda: driver)
    monkeypatch.setattr(rtx, "_loaded", {})
    return Plan(driver)


def test_a_plan_launches_the_recurrence(plan: Plan) -> None:
    given = inputs([drawn(9, 0), drawn(9, 1)], [0, 0], 9, 4)
    for got, want in zip(
        plan.run("GatedDeltaNet", [*given.values()]), launch.gated_delta_net(**given), strict=True
    ):
        assert torch.equal(got, want)


def test_what_a_plan_launches_is_the_operator(plan: Plan) -> None:
    rng = np.random.default_rng(3)
    e = layer(rng, 8, 160, 96, 4, biased=True)
    x = torch.from_numpy(rng.standard_normal((5, 160)) / 8).bfloat16()
    logits = torch.from_numpy(rng.standard_normal((5, 8)).astype(np.float32))
    up, down = (
        [a.view(torch.int8), b.view(torch.int8), c]
        for a, b, c in ((e.gate_up, e.gate_up_scales, e.gate_up_bias), (e.down, e.down_scales, e.down_bias))
    )
    shares, chosen, counts, arranged = plan.run("MoERoute", [logits, x], k=4)
    pairs, groups = plan.run("MoEGroup", [chosen, counts], k=4)
    (hidden,) = plan.run("MoEGateUp", [arranged, pairs, groups, *up], k=4, alpha=1.702, beta=1.0, limit=7.0)
    (parts,) = plan.run("MoEDown", [hidden, shares, pairs, groups, *down])
    (y,) = plan.run("MoECombine", [parts, x], k=4)
    want = expected(x, logits, e).astype(np.float64)
    assert np.max(np.abs(y.double().numpy() - want)) <= 2**-8 * np.max(np.abs(want))
    assert plan.driver.streams == [77] * 5
