"""Plugins: real plans of TensorRT-RTX without a GPU, and the launches of a plan against a stand-in of CUDA's driver.
TensorRT has the same classes.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dflash_plugins import compiler, kernels, plugins
from dflash_plugins import kernel_specs as uses
from dflash_plugins import layers as launch
from dflash_plugins.compiled import Compiled
from dflash_plugins.kernel_table import ATTEND, KERNELS
from dflash_plugins.plugins import empty_library, versioned

from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import BuildError, BundleError
from tests.doubles.checkpoints import make_drafter
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter
from tests.doubles.hybrid_checkpoints import make_hybrid
from tests.plugins import test_attention as attention
from tests.plugins.test_delta_net import drawn, inputs
from tests.plugins.test_moe import expected, layer

trt = pytest.importorskip("tensorrt_rtx", exc_type=ImportError)
linux = pytest.mark.skipif(sys.platform != "linux", reason="ELF")
TORCH = {"FLOAT": torch.float32, "BF16": torch.bfloat16, "INT32": torch.int32, "INT8": torch.int8}
TORCH["INT64"] = torch.int64
NAMES = {dtype: name for name, dtype in TORCH.items()}


@linux
def test_a_library_is_found_by_a_name_that_its_file_lacks(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"libdflash-none\.so"):
        ctypes.CDLL("libdflash-none.so")
    (tmp_path / "other.so").write_bytes(empty_library("libdflash-none.so", needs="libc.so.6"))
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
    assert set(launched(plan)) == {"route", "group", "gate_up", "down", "combine"}


@linux
def test_a_plan_holds_the_recurrence(tmp_path: Path) -> None:
    """In each of two layers, between quantized ones."""
    target = make_hybrid(
        tmp_path / "target", num_hidden_layers=3, layer_types=[*["linear_attention"] * 2, "full_attention"]
    )
    drafter = make_drafter(tmp_path / "drafter", target, block_size=6, layers=1, taps=(0, 1))
    plan = built_plan(target, drafter, tmp_path / "b", precision="target=int4")
    assert plan.count(versioned("GatedDeltaNet").encode()) >= 2
    assert len(launched(plan)) >= 2
    assert set(launched(plan)) == {"delta_rows"}


def launched(plan: bytes) -> list[str]:
    """The kernels that a plan holds."""
    found = []
    for at in re.finditer(re.escape(zlib.compress(b"", 9)[:2]), plan):
        with suppress(zlib.error):
            text = zlib.decompressobj().decompress(plan[at.start() : at.start() + (1 << 20)])
            found += [
                each.compiled.name for each in plugins._unpacked(np.frombuffer(zlib.compress(text), np.int8))
            ]
    return found


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
        self.launched: list[uses.Use] = []
        self.streams: list[int] = []

    def compile(self, use: uses.Use, capability: int) -> Compiled:
        assert capability == 89
        self.used[use.digest] = use
        function = self.function(use)
        names = tuple(name for name in function.arg_names if name in use.types)
        return Compiled(use.digest, "st.global", 32 * use.num_warps, 0, 1, 0, names)

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
        self.launched.append(use)
        self.streams.append(stream)


class Plan:
    """Plugins as TensorRT uses them: made, configured and written for a plan, and made again from the plan."""

    def __init__(self, driver: Interpreted) -> None:
        self.driver = driver
        creator = plugins._creator_class(trt)
        self.creators = {kernel.name: creator(kernel) for kernel in KERNELS}

    def run(
        self, name: str, inputs: list[torch.Tensor], *, tactic: int = 0, **attributes: float
    ) -> list[torch.Tensor]:
        creator = self.creators[name]
        creator.build = plugins.Build(89, timed=tactic > 0)
        fields = [plugins._field(trt, key, type(value), [value]) for key, value in attributes.items()]
        built = creator.create_plugin("node", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
        types = [getattr(trt.DataType, NAMES[each.dtype]) for each in inputs]
        described = [
            SimpleNamespace(desc=SimpleNamespace(dims=each.shape, type=kind), max=each.shape)
            for each, kind in zip(inputs, types, strict=True)
        ]
        built.configure_plugin(described, [])
        plugins.check()
        assert (tactic in built.get_valid_tactics()) == (tactic > 0)
        kept = built.clone()
        written = kept.get_fields_to_serialize()
        creator.build = None
        loaded = creator.create_plugin("node", written, trt.TensorRTPhase.RUNTIME)
        loaded.set_tactic(tactic)
        loaded = loaded.attach_to_context(None)
        sizes = loaded.kernel.sizes([each.shape for each in inputs]), loaded.kernel.given(attributes)
        outputs = [torch.empty(*shape) for shape, _ in loaded.kernel.outputs(*sizes).values()]
        kinds = loaded.get_output_data_types(types)
        outputs = [x.to(TORCH[kind.name]) for x, kind in zip(outputs, kinds, strict=True)]
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
    monkeypatch.setattr(plugins, "_driver", lambda: driver)
    monkeypatch.setattr(plugins, "_loaded", {})
    return Plan(driver)


def test_a_plan_launches_the_recurrence(plan: Plan) -> None:
    given = inputs([drawn(9, 0), drawn(9, 1)], [0, 0], 9, 4)
    for got, want in zip(
        plan.run("GatedDeltaNet", [*given.values()]), launch.gated_delta_net(**given), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("tactic", [0, 4])  # the first tile that fits, and TensorRT's choice of another
def test_what_a_plan_launches_is_the_operator(plan: Plan, tactic: int) -> None:
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
    constants = {"k": 4, "alpha": 1.702, "beta": 1.0, "limit": 7.0}
    (hidden,) = plan.run("MoEGateUp", [arranged, pairs, groups, *up], tactic=tactic, **constants)
    (parts,) = plan.run("MoEDown", [hidden, shares, pairs, groups, *down], tactic=tactic)
    (y,) = plan.run("MoECombine", [parts, x], k=4)
    want = expected(x, logits, e).astype(np.float64)
    assert np.max(np.abs(y.double().numpy() - want)) <= 2**-8 * np.max(np.abs(want))
    assert plan.driver.streams == [77] * 5
    rows = [use.constants["ROWS"] for use in plan.driver.launched if use.function in ("gate_up", "down")]
    assert rows == [128 if tactic else 64] * 2


@pytest.mark.parametrize("tactic", [0, 3])
def test_a_plan_launches_attention(plan: Plan, tactic: int) -> None:
    """Its parts have more rows than torch gives them."""
    given = attention.drawn(1, 4, 2, 16, 5, 60, tree=True, sinks=True)
    group = {"group": 2, "windowed": 0}
    parts = plan.run(
        "Attend", [given[name] for name in ATTEND.inputs if name in given], tactic=tactic, **group
    )
    (y,) = plan.run(
        "MergeAttention", [*parts, given["q"], given["k_cache"], given["sinks"]], heads=4, **group
    )
    attention.close(y, attention.expected(given))


def configured(name: str, build: plugins.Build, *shapes: tuple[int, ...], **attributes: int) -> Any:
    """A plugin in a build. Sizes of -1 are open, and 65 at most."""
    kernel = next(each for each in KERNELS if each.name == name)
    described = [
        SimpleNamespace(
            desc=SimpleNamespace(dims=dims, type=trt.DataType.BF16), max=[65 if d < 0 else d for d in dims]
        )
        for dims in shapes
    ]
    plugin = plugins._KernelPlugin(trt, kernel, attributes, build)
    plugin.configure_plugin(described, [])
    return plugin


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (("MoECombine", (-1, 64), (-1, -1)), r"size 1 of \(-1, -1\) is left open"),
        (("AcceptBlock", (-1, -1), (-1, -1), (-1, -1)), "size 1 of rows is 65, expected 64 or less"),
        (("MoECombine", (-1, 64), (-1, 64)), "MoECombine: every tile shape writes nothing"),
    ],
)
def test_what_cannot_be_built_is_refused(
    monkeypatch: pytest.MonkeyPatch, plugin: tuple[Any, ...], said: str
) -> None:
    """After the build, as an exception within it ends the process."""
    empty = Compiled("combine", "", 128, 1024, 64, 0, ())
    monkeypatch.setattr(compiler, "compile_kernel", lambda use, capability: empty)
    monkeypatch.setattr(plugins, "_failures", [])
    configured(plugin[0], plugins.Build(90, timed=True), *plugin[1:], k=4)
    with pytest.raises(BuildError, match=said):
        plugins.check()


@pytest.mark.parametrize("timed", [True, False])
def test_tiles_that_no_launch_can_have_are_not_timed(monkeypatch: pytest.MonkeyPatch, timed: bool) -> None:
    """Triton 3.7.1 compiled one to nothing."""

    def compiled(use: uses.Use, capability: int) -> Compiled:
        return Compiled("down", "" if use.num_stages == 2 else "st.global", 128, 1024, 64, 0, ())

    monkeypatch.setattr(compiler, "compile_kernel", compiled)
    shapes = (-1, 128), (-1, 4), (-1,), (8, 3), (8, 64, 2, 16), (8, 64, 2), (8, 64)
    plugin = configured("MoEDown", plugins.Build(90, timed), *shapes)
    fitting = [tile for tile in uses.TILES if tile.num_stages != 2]
    assert [choice.tile for choice in plugin.choices] == (fitting if timed else fitting[:1])
    assert plugin.get_valid_tactics() == ([1, 2, 3, 4] if timed else [])


def test_plans_of_another_version_are_refused() -> None:
    plugins.check_version({"engine": "onnxruntime"}, "bundle")
    plugins.check_version({"tensorrt": {"plugins": {"version": plugins.VERSION}}}, "bundle")
    with pytest.raises(BundleError, match=r"bundle: .*version is 0, expected 6"):
        plugins.check_version({"tensorrt": {"plugins": {"version": 0}}}, "bundle")
