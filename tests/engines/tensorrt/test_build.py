"""Plans built by the real TensorRT-RTX without a GPU: pairs, families, dtypes, GPUs, shapes, and failures.

A built plan need not compute correctly: test_numbers.py executes the same graphs.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.tensorrt import builder, plans
from dflash_trt.engines.tensorrt.options import FLAVOURS, TensorRTOptions, parse_capability
from dflash_trt.engines.tensorrt.plans import PlanLimits, profiles
from dflash_trt.errors import BuildError
from dflash_trt.files.disk import whole_file
from dflash_trt.formats.precision import Precision, parse_precision
from dflash_trt.graph.builder import INT64, GraphBuilder
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.reports.inspection import inspect
from dflash_trt.serving.deploy import container_command
from tests.doubles import fake_tensorrt
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_llama, make_qwen3_moe

_LONG = {"max_position_embeddings": 1 << 16}
# Small random checkpoints with two layers each.
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen3": partial(
        make_target, layers=2, sliding_window=7, layer_types=("sliding_attention", "full_attention")
    ),
    "llama": partial(make_llama, num_hidden_layers=2, attention_bias=True),
    "qwen3-moe": partial(make_qwen3_moe, num_hidden_layers=2, norm_topk_prob=False, moe_intermediate_size=64),
    "gpt-oss, experts in BF16": partial(make_gpt_oss, num_hidden_layers=2, quantized=False),
}
# Two narrow layers with the attention of a published target.
WIDE: dict[str, Callable[[Path], Path]] = {
    "qwen3-4b, wide": partial(make_target, layers=2, heads=32, kv_heads=8, head_dim=128, **_LONG),
    "gpt-oss-20b, wide": partial(
        make_gpt_oss, quantized=False, num_hidden_layers=2, num_local_experts=2, num_experts_per_tok=1,
        experts_per_token=1, num_attention_heads=64, num_key_value_heads=8, head_dim=64, sliding_window=128,
        **_LONG,
    ),
}  # fmt: skip
_ENTRY = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?([A-Za-z0-9_]+)\(')
_COUNT = re.compile(r"< (\d+)(?: / \d+)?\) \{")


def make_pair(name: str, directory: Path) -> tuple[str, str]:
    """The sources of a pair for `build`, written into `directory`."""
    target = (FAMILIES | WIDE)[name](directory / "target")
    settings: dict[str, Any] = {"layers": 1, "taps": (0, 1), "block_size": 4}
    if name in WIDE:
        settings |= {"layers": 2, "heads": 32, "kv_heads": 8, "head_dim": 128}
    return str(target), str(make_drafter(directory / "drafter", target, **settings))


def check_attention(bundle: Bundle, capability: int) -> dict[str, list[str]]:
    """It reads the tiles in use, from the cache, by the cache's own heads. Returns each plan's kernels that go over a
    whole cache of the usual batch.
    """
    built, copies = bundle.manifest["tensorrt"], {}
    for role, plan in built["plans"][str(capability)].items():
        text = (bundle.path / plan["plan"]).read_bytes().decode("latin-1")
        entries = list(_ENTRY.finditer(text))
        attention = sum(match[1].startswith("_gemm_mha") for match in entries)
        assert attention > 0, role
        repeated = re.search(r"\b1, // query heads per k/v head", text)
        assert not repeated, f"{role}: keys and values are repeated for each head of the queries"
        skipping = len(re.findall(r"initialize\(DATA_TYPE[^;]*_tile_skip_map", text))
        assert skipping == attention, f"{role}: attention reads the whole capacity"
        inputs = onnx.load(bundle.path / f"{role}.onnx", load_external_data=False).graph.input
        dims = next(value for value in inputs if "_cache." in value.name).type.tensor_type.shape.dim
        elements = (
            max(1, built["max_batch_size"] // 2) * dims[1].dim_value * bundle.capacity * dims[3].dim_value
        )
        copies[role] = [
            match[1]
            for match, body in zip(entries, _ENTRY.split(text)[2::2], strict=True)
            if max(map(int, _COUNT.findall(body[:6000])), default=0)
            >= elements // 2  # two of bfloat16 in one
        ]
    return copies


SMALL = TensorRTOptions(capabilities=(120,), max_batch_size=2, prefill_chunk=16)
RTX = FLAVOURS["tensorrt-rtx"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The smallest pair: two layers, one of them sliding, and a drafter with one layer."""
    directory = tmp_path_factory.mktemp("pair")
    target = make_target(
        directory / "target", layers=2, sliding_window=7, layer_types=("sliding_attention", "full_attention")
    )
    drafter = make_drafter(directory / "drafter", target, layers=1, taps=(0, 1), block_size=4)
    return str(target), str(drafter)


def rtx(
    sources: tuple[str, str | None], out: Path, options: TensorRTOptions = SMALL, **settings: Any
) -> Bundle:
    """Without plugins: this process interprets their kernels. tests/plugins/test_plugins.py builds a plan with them."""
    settings = {"max_seq_len": 64, "options": replace(options, plugins="none")} | settings
    return build(*sources, out, engine="tensorrt-rtx", **settings)


def test_a_shipped_pair(tmp_path: Path) -> None:
    options = TensorRTOptions(capabilities=(120,), max_batch_size=4, prefill_chunk=128)
    bundle = rtx(("tiny", None), tmp_path / "bundle", options, max_seq_len=512)
    found = inspect(bundle.path)
    assert set(found["plans"]) == {"sm120/target", "sm120/drafter"}
    for entry in found["plans"].values():
        assert entry["precision"] == "bfloat16"
        assert entry["size"] > sum(entry["weight_bytes"].values())
        assert "S 1..128" in entry["prefill"]
    verify = found["plans"]["sm120/target"]["verify"]
    assert verify == "B 1..4 S 1..8 R 1..8"
    assert found["tensorrt"] == {"version": RTX.load().__version__, "max_batch_size": 4, "prefill_chunk": 128}
    assert f"[serve,tensorrt-rtx] tensorrt-rtx-cu13=={RTX.load().__version__} &&" in container_command(bundle)
    check_attention(bundle, 120)
    assert not (bundle.path / "weights").exists()
    assert all("tmp" not in log.read_text() for log in bundle.path.rglob("*.log"))


@pytest.mark.parametrize(("name", "capability"), [("qwen3-4b, wide", 89), ("gpt-oss-20b, wide", 120)])
def test_attention_of_published_targets(name: str, capability: int, tmp_path: Path) -> None:
    options = TensorRTOptions(capabilities=(capability,), max_batch_size=8, prefill_chunk=64)
    bundle = rtx(make_pair(name, tmp_path), tmp_path / "bundle", options, max_seq_len=4096)
    # A cache is much larger than the rows of a pass here.
    assert check_attention(bundle, capability) == {"target": [], "drafter": []}


@pytest.mark.parametrize(
    ("family", "asked", "capability"),
    [
        ("qwen3", "target=int8", 86),
        ("qwen3", "target=fp32,drafter=fp32", 80),
        ("llama", "target=fp16,drafter=fp16", 86),
        ("llama", "target=nvfp4,drafter=fp8,head=int4", 120),
        ("qwen3-moe", "target=nvfp4,drafter=nvfp4", 121),
        ("gpt-oss, experts in BF16", "target=fp16,drafter=nvfp4,head=mxfp4", 120),
    ],
)
def test_families_and_precisions(family: str, asked: str, capability: int, tmp_path: Path) -> None:
    """Each family, and each kind of precision. Every stored form is in tests/quantization/test_tensorrt_forms.py."""
    sources, precision = make_pair(family, tmp_path), parse_precision(asked)
    options = TensorRTOptions(capabilities=(capability,), max_batch_size=2, prefill_chunk=16)
    bundle = rtx(sources, tmp_path / "bundle", options, precision=precision)
    roles = ("target", "drafter")
    plans = {name for name in bundle.manifest["files"] if name.endswith(".plan")}
    assert plans == {f"plans/sm{capability}/{role}.plan" for role in roles}
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float"}
    assert bundle.manifest["precision"] == {role: names[precision.compute(role, "bf16")] for role in roles}
    stored = {"fp8": "FLOAT8E4M3FN", "nvfp4": "FLOAT4E2M1", "mxfp4": "FLOAT4E2M1", "int4": "INT4"}
    stored["int8"] = "INT8"
    for role, plan in bundle.manifest["tensorrt"]["plans"][str(capability)].items():
        if scheme := precision.scheme(role):
            assert plan["weight_bytes"][stored[scheme]] > 0
    if family == "qwen3-moe" and precision.scheme("target"):  # without biases
        assert "BF16" not in bundle.manifest["target"]["weight_bytes"]["experts"]


def test_plans_that_take_trees(pair: tuple[str, str], tmp_path: Path) -> None:
    """Several candidates for each place, and which rows of a pass each row sees. Attention still skips tiles."""
    bundle = rtx(pair, tmp_path / "b", tree_width=3)
    assert bundle.manifest["tree_width"] == 3
    assert bundle.manifest["tensorrt"]["plans"]["120"]["target"]["profiles"][1]["S"] == [1, 4, 4]
    plan = (bundle.path / "plans/sm120/target.plan").read_bytes()
    assert all(name in plan for name in (b"visible", b"depths"))
    check_attention(bundle, 120)


def test_a_node_that_tensorrt_rejects_is_named(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tap(self: TensorRT, taps: int) -> Any:
        g = GraphBuilder("HiddenStateTap")
        hidden = [g.input(f"h_{i}", self.dtype, ["rows", "D"]) for i in range(taps)]
        bits = g.op("Cast", hidden[0], to=int(INT64))
        bits = g.op("BitwiseNot", bits, name="flip")
        both = g.op("Concat", g.op("Cast", bits, to=int(self.dtype)), *hidden[1:], axis=-1)
        g.output(both, "features", self.dtype, ["rows", "nD"])
        return g.function()

    monkeypatch.setattr(TensorRT, "hidden_state_tap", tap)
    with pytest.raises(BuildError) as caught:
        rtx(pair, tmp_path / "b")
    message = str(caught.value)
    assert message.startswith(
        "target.onnx: TensorRT-RTX does not support target/features_flat (HiddenStateTap)"
    )
    assert "HiddenStateTap/flip (BitwiseNot)" in message
    assert "\n" not in message
    assert not (tmp_path / "b").exists()


def test_what_the_builder_refuses_is_said_in_one_line(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP32 attention that may not be decomposed has no kernel."""
    attend = TensorRT._attend

    def fused(self: TensorRT, *args: Any, **kwargs: Any) -> Any:
        self.fused = True
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(TensorRT, "_attend", fused)
    with pytest.raises(BuildError, match=r"target\.onnx: .*Attention operation was not") as e:
        rtx(pair, tmp_path / "b", precision=Precision("fp32", "fp32"))
    assert "\n" not in str(e.value)
    (log,) = tmp_path.rglob("sm120/target.log")
    assert str(log) in str(e.value)
    assert "Attention operation was not supported" in log.read_text()
    assert [p for p in tmp_path.rglob("*") if p.suffix in (".plan", ".part")] == []


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond this size, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk(pair: tuple[str, str], tmp_path: Path) -> None:
    with (
        largest_file(1 << 20),
        pytest.raises(BuildError, match=r"target\.plan: cannot be written: File too large"),
    ):
        rtx(pair, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    assert [p for p in tmp_path.rglob("*") if p.suffix in (".plan", ".part")] == []
    assert rtx(pair, tmp_path / "b").manifest["engine"] == "tensorrt-rtx"


def write_two_pieces(plan: Path) -> None:
    trt = SimpleNamespace(IStreamWriter=type("IStreamWriter", (), {}))
    with largest_file(1000), whole_file(plan) as file:
        writer = builder._writer(trt, file.raw)
        assert [writer.write(bytes(n)) for n in (900, 200)] == [900, 0]
        assert writer.failure.errno == errno.EFBIG
        raise BuildError("the plan")


def test_a_disk_that_is_full_in_the_last_small_piece(tmp_path: Path) -> None:
    """What a buffer would hold back until the file is closed is noticed at once, too."""
    with pytest.raises(BuildError, match="the plan"):
        write_two_pieces(tmp_path / "plan")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_build_stops_tensorrt(pair: tuple[str, str], tmp_path: Path) -> None:
    def interrupt(step: str, done: int, total: int) -> None:
        if step == "build target sm120" and 0 < done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rtx(pair, tmp_path / "b", progress=interrupt)
    assert not (tmp_path / "b").exists()
    assert [p for p in tmp_path.rglob("*") if p.suffix in (".plan", ".part")] == []


def test_a_killed_build_is_continued(pair: tuple[str, str], tmp_path: Path) -> None:
    """Killed while the second of four plans is built: nothing looks finished, and the first plan is not built again."""
    script = (
        "import os, sys\n"
        "from dflash_trt.building.build import build; from dflash_trt.engines.tensorrt.options import TensorRTOptions\n"
        "def killed(step, done, total):\n"
        "    step == 'build drafter sm120' and done and os.kill(os.getpid(), 9)\n"
        "options = {'engine': 'tensorrt-rtx', 'options': TensorRTOptions((120, 89), 2, 16), 'max_seq_len': 64}\n"
        "build(*sys.argv[1:4], progress=killed, **options)\n"
    )
    out = tmp_path / "b"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", script, *pair, str(out)], env=environment)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    (begun,) = tmp_path.rglob("sm120/drafter.log")
    folder = begun.parent
    first = (folder / "target.plan").stat().st_mtime_ns
    assert not (folder / "drafter.plan").exists()
    steps: list[str] = []
    options = TensorRTOptions((120, 89), 2, 16)
    bundle = rtx(pair, out, options, progress=lambda step, *_: steps.append(step))
    assert (bundle.path / "plans/sm120/target.plan").stat().st_mtime_ns == first
    assert "build target sm120" not in steps
    assert {"build drafter sm120", "build target sm89", "build drafter sm89"} <= set(steps)
    Bundle.open(out, check="full")
    assert sorted(p.name for p in out.rglob("*.json") if "plans" in p.parts) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (((120, 90),), "TensorRT-RTX serves 80, 86, 89, 120, 121; for 90 use --engine tensorrt$"),
        (((120, 100),), "for 100 use --engine tensorrt$"),
        (((120, 61),), "for 61 no TensorRT flavour is known to$"),
        (((120,), 2, 80), "--prefill-chunk is 80, but the cache has 73 rows, and a pass can fill 68 of them"),
        (((120,), 2, 3), r"--prefill-chunk is 3, expected 4 \(the block size\) or more"),
        (((120,), 0), "--max-batch-size is 0, expected 1 or more"),
        ((), "nvidia-smi shows no GPU here; say which GPU to build for: --compute-capability 120"),
    ],
)
def test_impossible_options(
    options: tuple[Any, ...],
    message: str,
    pair: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "compute_capabilities", list)
    with pytest.raises(BuildError, match=message):
        rtx(pair, tmp_path / "b", TensorRTOptions(*options))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package(pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(BuildError, match="pip install 'tensorrt-rtx-cu13"):
        rtx(pair, tmp_path / "b")


def test_plans_need_weights(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="--weights is none, but --engine tensorrt-rtx builds plans"):
        build("gpt-oss-20b", None, tmp_path / "b", engine="tensorrt-rtx", weights="none", options=SMALL)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((120,), "builds for the GPUs it finds \\(90\\).*or use --engine tensorrt-rtx"),
        ((100,), "builds for the GPUs it finds \\(90\\); build on such a machine$"),
        ((61,), "TensorRT serves 80"),
    ],
)
def test_full_tensorrt_builds_for_what_is_there(asked: tuple[int, ...], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        FLAVOURS["tensorrt"].check_capabilities(asked, [90], formats=())


def test_an_old_tensorrt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
    monkeypatch.setattr(fake_tensorrt, "__version__", "10.9.0.34")
    with pytest.raises(BuildError, match=r"TensorRT 10\.9\.0\.34 is installed, expected 10\.15 or newer"):
        FLAVOURS["tensorrt"].load()


@pytest.mark.parametrize(("text", "value"), [("120", 120), ("12.0", 120), ("sm_89", 89), ("SM121", 121)])
def test_capabilities_are_read(text: str, value: int) -> None:
    assert parse_capability(text) == value
    with pytest.raises(ArgumentTypeError, match=f"'x{text}'"):
        parse_capability(f"x{text}")


def test_profiles_cover_what_the_pair_runs() -> None:
    limits = PlanLimits(3, 512, 10, 8192)
    prefill, verify = profiles("target", limits)
    assert prefill.shapes(["B", "S"]) == ((1, 1), (1, 512), (1, 512))
    assert verify.shapes(["B", "S", "R", 7]) == ((1, 1, 1, 7), (1, 10, 10, 7), (3, 10, 10, 7))
    prefill, draft = profiles("drafter", limits)
    assert draft.shapes(["B", "S", "K"]) == ((1, 10, 2), (1, 10, 10), (3, 10, 10))
    assert prefill.shapes(["B", "S", "K"]) == ((1, 1, 2), (1, 512, 2), (1, 512, 2))
