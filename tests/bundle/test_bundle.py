"""Bundles: the result of a build that ends, is killed or is repeated, and the checks at load time."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from safetensors.torch import load_file, save_file

from dflash_trt import LLM
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import MANIFEST, Bundle, write_manifest
from dflash_trt.checkpoint.catalogue import PAIRS, known_configs
from dflash_trt.engines import graph_job
from dflash_trt.errors import BuildError, BundleError, CheckpointError
from tests.doubles.checkpoints import make_drafter, make_target


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    make_target(root / "target")
    make_drafter(root / "drafter", root / "target")
    make_drafter(root / "other", root / "target", seed=7)
    return root


@pytest.fixture(scope="module")
def built(checkpoints: Path) -> Path:
    return build_pair(checkpoints, checkpoints / "bundle").path


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(built, tmp_path / "bundle"))


def build_pair(checkpoints: Path, out: Path, drafter: str = "drafter", **options: Any) -> Bundle:
    return build(str(checkpoints / "target"), str(checkpoints / drafter), out, **options)


def manifest_of(bundle: Path) -> dict[str, Any]:
    return dict(json.loads((bundle / MANIFEST).read_text()))


def leftovers(out: Path) -> list[str]:
    """Files beside `out` that should be gone."""
    return sorted(p.name for p in out.parent.glob(f".{out.name}.*"))


def test_a_bundle_holds_what_its_manifest_says(built: Path) -> None:
    manifest = Bundle.open(built, "full").manifest
    files = {str(p.relative_to(built)) for p in built.rglob("*") if p.is_file()}
    assert files == {*manifest["files"], MANIFEST}
    assert manifest["block_size"] == 8
    assert manifest["target_layer_ids"] == sorted(manifest["target_layer_ids"])
    assert str(built.parent) not in (built / MANIFEST).read_text()


def test_weights_are_taken_as_they_are(checkpoints: Path, built: Path) -> None:
    for role in ("target", "drafter"):
        copied, original = (p / "model.safetensors" for p in (built / "weights" / role, checkpoints / role))
        assert copied.read_bytes() == original.read_bytes()
    for graph in ("target.onnx", "drafter.onnx"):
        model = onnx.load(str(built / graph), load_external_data=False)
        weights = [t for t in model.graph.initializer if t.name.startswith("weights/")]
        assert weights
        assert all(t.data_location == onnx.TensorProto.EXTERNAL and not t.raw_data for t in weights)


def test_graphs_pass_the_checker_and_name_their_nodes_as_paths(bundle: Path) -> None:
    for graph, name in (
        ("target.onnx", "target/layers.3/attention/o_proj"),
        ("drafter.onnx", "drafter/layers.1/mlp/down_proj"),
    ):
        onnx.checker.check_model(str(bundle / graph), full_check=True)
        model = onnx.load(str(bundle / graph), load_external_data=False)
        assert name in {node.name for node in model.graph.node}
        operators = {"AttentionMask", "CachedAttention"}
        if graph == "target.onnx":
            operators |= {"HiddenStateTap", "BlockAcceptance"}
        assert {f.name for f in model.functions} == operators


def test_the_same_build_again_keeps_the_bundle(checkpoints: Path, built: Path) -> None:
    before = (built / MANIFEST).stat().st_mtime_ns
    build_pair(checkpoints, built)
    assert (built / MANIFEST).stat().st_mtime_ns == before
    assert leftovers(built) == []


def test_another_build_does_not_replace_a_bundle_unasked(checkpoints: Path, bundle: Path) -> None:
    before = manifest_of(bundle)
    with pytest.raises(BuildError, match="--force"):
        build_pair(checkpoints, bundle, "other")
    assert manifest_of(bundle) == before
    Bundle.open(bundle, "full")
    build_pair(checkpoints, bundle, "other", force=True)
    assert manifest_of(bundle)["key"] != before["key"]
    Bundle.open(bundle, "full")


def test_changed_weights_make_another_bundle(checkpoints: Path, built: Path) -> None:
    """The key covers the weights themselves: `other` differs from `drafter` only in them."""
    other = build_pair(checkpoints, checkpoints / "other-bundle", "other")
    assert other.manifest["drafter"]["config_sha256"] == manifest_of(built)["drafter"]["config_sha256"]
    assert other.manifest["key"] != manifest_of(built)["key"]


def test_changed_graphs_make_another_bundle(checkpoints, built, monkeypatch) -> None:
    export = graph_job._export

    def renamed(*args: Any) -> dict[str, ir.Model]:
        models = export(*args)
        next(iter(models["target"].graph)).name = "target/renamed"
        return models

    monkeypatch.setattr(graph_job, "_export", renamed)
    other = build_pair(checkpoints, checkpoints / "other-graph")
    assert other.manifest["key"] != manifest_of(built)["key"]
    assert other.manifest.keys() == manifest_of(built).keys()


def test_a_damaged_bundle_is_replaced_when_asked(checkpoints: Path, bundle: Path) -> None:
    (bundle / "target.onnx").write_bytes(b"")
    with pytest.raises(BuildError, match=r"damaged .*target\.onnx: 0 bytes.*--force"):
        build_pair(checkpoints, bundle)
    assert (bundle / "target.onnx").read_bytes() == b""
    build_pair(checkpoints, bundle, force=True)
    Bundle.open(bundle, "full")
    assert leftovers(bundle) == []


def test_something_else_in_the_way_is_left_alone(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("buy milk")
    with pytest.raises(BuildError, match="is not a bundle"):
        build_pair(checkpoints, tmp_path / "notes")
    (tmp_path / "file").write_text("x")
    with pytest.raises(BuildError, match="is a file"):
        build_pair(checkpoints, tmp_path / "file")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "notes", "todo.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seq_len": 1}, r"--max-seq-len is 1, expected 2\.\.\d+"),
        ({"max_seq_len": 10**9}, r"--max-seq-len is 1000000000"),
        ({"block_size": 9}, r"--block-size is 9, expected 2\.\.8"),
        ({"block_size": 1}, r"--block-size is 1"),
    ],
)
def test_impossible_options_are_refused(checkpoints, tmp_path, options, message) -> None:
    with pytest.raises(BuildError, match=message):
        build_pair(checkpoints, tmp_path / "bundle", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_tied_head_that_is_stored_must_be_the_embedding(checkpoints: Path, tmp_path: Path) -> None:
    make_target(tmp_path / "target", tie=True)
    weights = tmp_path / "target" / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, weights)
    build(str(tmp_path / "target"), str(checkpoints / "drafter"), tmp_path / "same")
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, weights)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true.*lm_head\.weight"):
        build(str(tmp_path / "target"), str(checkpoints / "drafter"), tmp_path / "other")


def test_two_builds_of_one_bundle_do_not_mix(checkpoints: Path, tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait(step: str, done: int, total: int) -> None:
        if step == "write graphs":
            reached.set()
            assert go_on.wait(120)

    out = tmp_path / "bundle"
    first = threading.Thread(target=build_pair, args=(checkpoints, out), kwargs={"progress": wait})
    first.start()
    assert reached.wait(120)
    try:
        with pytest.raises(BuildError, match="another process"):
            build_pair(checkpoints, out)
    finally:
        go_on.set()
        first.join()
    Bundle.open(out, "full")


@pytest.mark.parametrize("name", ["target.onnx", "weights/target/model.safetensors", "tokenizer.json"])
def test_truncated_and_missing_files_are_named(bundle: Path, name: str) -> None:
    file = bundle / name
    size = file.stat().st_size
    with file.open("r+b") as f:
        f.truncate(size - 1)
    with pytest.raises(BundleError, match=rf"{name}: {size - 1} bytes.* {size}"):
        Bundle.open(bundle)
    file.unlink()
    with pytest.raises(BundleError, match=rf"{name}: missing"):
        Bundle.open(bundle)


def test_altered_files_are_named(bundle: Path) -> None:
    for name, check in (("tokenizer.json", "size"), ("weights/target/model.safetensors", "full")):
        file = bundle / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(BundleError, match=rf"{name}: sha256 differs"):
            Bundle.open(bundle, check)
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    Bundle.open(bundle, "full")


def test_graphs_of_two_builds_do_not_go_together(checkpoints: Path, bundle: Path) -> None:
    other = build_pair(checkpoints, checkpoints / "short-blocks", block_size=4).path
    shutil.copy(other / "drafter.onnx", bundle / "drafter.onnx")
    manifest = manifest_of(bundle)
    manifest["files"]["drafter.onnx"] = manifest_of(other)["files"]["drafter.onnx"]
    write_manifest(bundle, manifest)
    with pytest.raises(BundleError, match=r"drafter\.onnx: key is "):
        Bundle.open(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format_version is 99"), ({"format_version": None}, "format_version is null"),
        ({"block_size": "8"}, 'block_size is "8"'), ({"block_size": 7}, r"block_size is 8, the manifest says 7"),
        ({"files": {}}, r"does not list target\.onnx"),
        ({"files": {"../x": {"size": 1}}}, "not a file inside the bundle"),
        ({"files": {"/etc/passwd": {"size": 1, "sha256": ""}}}, "not a file inside the bundle"),
        ({"files": {"a/../../x": {"size": 1, "sha256": ""}}}, "not a file inside the bundle"),
        ({"files": {"a\0b": {"size": 1, "sha256": ""}}}, "not a file inside the bundle"),
        ({"files": {"": {"size": 1, "sha256": ""}}}, "not a file inside the bundle"),
        ({"files": {MANIFEST: {"size": 1, "sha256": ""}}}, "not a file inside the bundle"),
        ({"files": {"x": 1}}, "has no size"), ({"files": {"x": {"size": 1}}}, "has no sha256"),
        ({"mask_token_id": True}, "mask_token_id is true"), ({"max_seq_len": None}, "max_seq_len is null"),
    ],
)  # fmt: skip
def test_a_manifest_that_is_wrong_names_the_field(bundle: Path, change: dict[str, Any], message: str) -> None:
    write_manifest(bundle, manifest_of(bundle) | change)
    with pytest.raises(BundleError, match=message):
        Bundle.open(bundle)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\x00" * 10])
def test_a_manifest_that_is_no_manifest(bundle: Path, text: str) -> None:
    (bundle / MANIFEST).write_text(text)
    with pytest.raises(BundleError, match=MANIFEST):
        Bundle.open(bundle)


def test_graphs_alone_can_be_built_and_not_run(tmp_path: Path, checkpoints: Path) -> None:
    """Without weights: the same graphs, from the configurations alone."""
    for role in ("target", "drafter"):
        (tmp_path / role).mkdir()
        shutil.copy(checkpoints / role / "config.json", tmp_path / role)
    pair = str(tmp_path / "target"), str(tmp_path / "drafter")
    bundle = build(*pair, tmp_path / "bundle", weights="none")
    assert not list(bundle.path.rglob("*.safetensors"))
    whole = build_pair(checkpoints, checkpoints / "bundle").manifest
    for role in ("target", "drafter"):
        assert bundle.manifest[role]["parameters"] == whole[role]["parameters"]
        assert bundle.manifest[role]["weight_bytes"] == whole[role]["weight_bytes"]
        graphs = [
            onnx.load(str(p / f"{role}.onnx"), load_external_data=False).graph
            for p in (bundle.path, checkpoints / "bundle")
        ]
        assert [n.name for n in graphs[0].node] == [n.name for n in graphs[1].node]
        assert [(t.name, list(t.dims)) for t in graphs[0].initializer] == [
            (t.name, list(t.dims)) for t in graphs[1].initializer
        ]
    with pytest.raises(BundleError, match="--weights none"):
        LLM(bundle.path)


def _one_of_each() -> list[str]:
    """A known pair of each two architectures and ways to store a target."""
    pairs: dict[tuple[Any, ...], str] = {}
    for pair in PAIRS:
        if pair.target_repo:
            target, drafter = (
                json.loads((path / "config.json").read_text()) for path in known_configs(pair.name)
            )
            stored = (target | target.get("text_config", {})).get("quantization_config")
            pairs.setdefault(
                (target["architectures"][0], drafter["architectures"][0], str(stored)), pair.name
            )
    return list(pairs.values())


@pytest.mark.parametrize("name", _one_of_each())
def test_full_size_graphs_of_known_pairs_pass_the_checker(tmp_path: Path, name: str) -> None:
    """The checker needs the weight files to exist. Sparse files of the right length are enough."""
    bundle = build(name, None, tmp_path / "bundle", weights="none")
    manifest = bundle.manifest
    sizes = {"head": 4 * manifest["vocab_size"] * manifest["hidden_size"]}
    for role in ("target", "drafter"):
        sizes[role] = sum(sum(by_dtype.values()) for by_dtype in manifest[role]["weight_bytes"].values())
    for role, size in sizes.items():
        weights = bundle.path / "weights" / role / "model.safetensors"
        weights.parent.mkdir(parents=True)
        with weights.open("wb") as file:
            file.truncate(size)
    for role in ("target", "drafter"):
        onnx.checker.check_model(str(bundle.path / f"{role}.onnx"), full_check=True)


def test_places_without_a_bundle_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="dflash-trt build"):
        Bundle.open(tmp_path / "none")
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        Bundle.open(tmp_path)
