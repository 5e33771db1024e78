"""Graphs that call plugins, and the builds that use them."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from dflash_plugins.dialect import TensorRTPlugins
from dflash_plugins.kernel_table import KERNELS
from dflash_plugins.plugins import VERSION, Build, versioned

from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.tensorrt import builder, plans
from dflash_trt.engines.tensorrt.options import FLAVOURS, Flavour, TensorRTOptions
from dflash_trt.errors import BuildError
from dflash_trt.formats.precision import parse_precision
from dflash_trt.graph.builder import DFLASH_DOMAIN
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.models.configs import read_target_config
from dflash_trt.models.target import build_target
from tests.doubles.family_checkpoints import make_gpt_oss

# What a build reads of a target's configuration.
TARGETS: dict[str, Any] = {
    name: SimpleNamespace(
        path="config.json",
        moe=SimpleNamespace(quantization="mxfp4") if name == "experts" else None,
        delta_layers=["a layer"] if name == "states" else [],
    )
    for name in ("", "experts", "states")
}
PLUGINS = {versioned(kernel.name): kernel for kernel in KERNELS}


def gpt_oss(directory: Path, dialect: TensorRT) -> ir.Model:
    if not directory.exists():
        make_gpt_oss(directory)
    checkpoint, config = Checkpoint(directory), read_target_config(directory)
    return build_target(config, checkpoint, [0, 1], dialect, folder="weights", capacity=64)


def test_the_graph_calls_plugins_as_their_table_says(tmp_path: Path) -> None:
    with_plugins = gpt_oss(tmp_path / "weights", TensorRTPlugins(ir.DataType.BFLOAT16))
    caches = [v for v in with_plugins.graph.inputs if "_cache." in (v.name or "")]
    sizes = {v.shape[3] for v in caches if v.shape is not None}
    assert sizes == {read_target_config(tmp_path / "weights").head_dim}  # no columns for sinks
    ir.save(with_plugins, tmp_path / "target.onnx")
    onnx.checker.check_model(tmp_path / "target.onnx")
    nodes = [node.op_type for node in with_plugins.graph if node.domain == DFLASH_DOMAIN]
    assert nodes.count("MoE") == 4
    # One range of cache rows for each kind of layer, in place of a mask for each layer.
    attention = sorted(name for name in nodes if "SinkAttention" in name)
    assert attention[:4] == ["SinkAttention"] * 2 + ["SinkAttentionMask"] * 2
    assert attention[4:] == ["WindowedSinkAttention"] * 2
    used, missing = set(), Counter({"Attend": 3})  # two are for trees, and one for torch
    for node in itertools.chain.from_iterable(with_plugins.functions.values()):
        if node.domain == DFLASH_DOMAIN:
            plugin = PLUGINS[node.op_type]
            assert (
                plugin.name == "HiddenStateTap"
                or len(node.inputs) == len(plugin.inputs) - missing[plugin.name]
            )
            assert node.attributes.keys() - {"plugin_namespace", "plugin_version"} == plugin.attributes.keys()
            used.add(plugin.name)
    assert used == {
        *("HiddenStateTap", "SampleTiles", "SampleSelect", "AcceptBlock", "Attend", "MergeAttention"),
        *("MoERoute", "MoEGroup", "MoEGateUp", "MoEDown", "MoECombine"),
    }
    experts = [v for v in with_plugins.graph.initializers.values() if "_proj_blocks" in (v.name or "")]
    assert experts
    assert {v.dtype for v in experts} == {ir.DataType.INT8}  # the checkpoint's bytes as signed bytes


def made(
    monkeypatch: pytest.MonkeyPatch,
    engine: str = "tensorrt",
    capability: int = 90,
    precision: str | None = None,
    target: str = "",
    **options: Any,
) -> plans.Plans:
    monkeypatch.setattr(Flavour, "load", lambda self: SimpleNamespace(__version__="11.4"))
    monkeypatch.setattr(plans, "has_operator", lambda module, name: True)
    monkeypatch.setattr(plans, "compute_capabilities", lambda: (capability,))
    return plans.Plans(
        engine,
        TensorRTOptions(capabilities=(capability,), **options),
        parse_precision(precision),
        TARGETS[target],
        roles=("target", "drafter"),
        block_size=8,
        capacity=128,
        formats=(),
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"target", "drafter"}), ({"capability": 89}, {"target", "drafter"}),
        ({"capability": 100}, {"target", "drafter"}), ({"capability": 120}, {"target", "drafter"}),
        ({"precision": "target=fp16"}, {"target", "drafter"}), ({"precision": "target=fp32"}, {"drafter"}),
        ({"precision": "drafter=fp32"}, {"target"}), ({"plugins": "none"}, set()), ({"capability": 86}, set()),
        ({"engine": "tensorrt-rtx", "capability": 120}, set()),
        ({"engine": "tensorrt-rtx", "capability": 120, "target": "experts"}, {"target"}),
        ({"engine": "tensorrt-rtx", "capability": 89, "target": "experts"}, {"target"}),
        ({"engine": "tensorrt-rtx", "capability": 121, "target": "experts"}, {"target"}),
        ({"engine": "tensorrt-rtx", "capability": 86, "target": "states"}, {"target"}),
        ({"capability": 90, "target": "states", "precision": "target=fp32,drafter=fp32"}, {"target"}),
    ],
)  # fmt: skip
def test_who_gets_plugins(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], expected: set[str]
) -> None:
    found = made(monkeypatch, **arguments)
    assert found.plugins == expected
    assert found.describe().get("plugins", {}).get("version") == (VERSION if expected else None)
    assert {role for role, each in found.dialects.items() if each.name != "tensorrt"} == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"target": "experts", "plugins": "none"}, "experts in MXFP4 by plugins only, and --plugins none"),
        ({"target": "states", "plugins": "none"}, "Gated DeltaNet by plugins only, and --plugins none"),
        ({"target": "states", "engine": "tensorrt-rtx", "plugins": "none"}, "--plugins none"),
        ({"target": "experts", "precision": "target=fp32"}, "leave --precision target=fp32 out"),
        (
            {"target": "states", "capability": 103},
            "103: .* Gated DeltaNet .* for 89, 90, 100, 120; use --engine torch",
        ),
    ],
)
def test_targets_that_need_plugins_are_refused_without(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(BuildError, match=said):
        made(monkeypatch, **{"capability": 120} | arguments)


def test_without_triton_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor with one that cannot be imported."""
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not made(monkeypatch).plugins
    with pytest.raises(BuildError, match="Triton"):
        made(monkeypatch, target="states")


@pytest.mark.parametrize("engine", [None, "tensorrt", "tensorrt-rtx"])
def test_the_builder_registers_plugins_before_it_parses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str | None
) -> None:
    """TensorRT times their tile sizes on its GPU."""
    happened: list[Any] = []
    network = SimpleNamespace(create_network=lambda flags: happened.append("network"))
    trt = SimpleNamespace(
        NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1),
        Builder=lambda logger: network,
        OnnxParser=lambda *_: SimpleNamespace(parse_from_file=lambda path: happened.append("parse")),
    )
    monkeypatch.setattr(Flavour, "load", lambda self: trt)
    monkeypatch.setattr(builder, "_logger", lambda trt, log: SimpleNamespace(file=log.name))
    monkeypatch.setattr(builder, "_parser_error", lambda parser, flavour: "refused")
    monkeypatch.setattr(builder, "register", lambda trt, build: happened.append(build))
    with pytest.raises(BuildError, match="refused"):
        builder.build_plan(
            FLAVOURS[engine or "tensorrt"],
            *(tmp_path / "target.onnx", tmp_path / "target.plan", [], 100, lambda step, done, total: None),
            plugins=engine is not None,
        )
    before = [] if engine is None else [Build(100, timed=engine == "tensorrt")]
    assert happened == [*before, "network", "parse"]
