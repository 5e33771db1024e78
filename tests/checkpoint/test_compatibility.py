"""Pairs that do not fit are refused with both values, and names resolve to directories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.building import sources
from dflash_trt.building.sources import Source, find_sources, resolve
from dflash_trt.checkpoint.catalogue import PAIRS, KnownPair, find_drafter, known_configs, known_pair
from dflash_trt.checkpoint.pair import check_pair, check_tokenizers
from dflash_trt.engines import registry
from dflash_trt.errors import CheckpointError, PairError
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.families import FAMILIES
from dflash_trt.trtllm import HYBRIDS
from tests.checkpoint.test_config import DRAFTER, TARGET, write

PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
TOKENIZER: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": []},
    "added_tokens": [{"id": 151643, "content": "<|endoftext|>", **PLAIN}],
}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    target, drafter = write(tmp_path / "target", TARGET), write(tmp_path / "drafter", DRAFTER)
    write(target, TOKENIZER, "tokenizer.json")
    return target, drafter


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 4096}, "hidden_size is 4096, but .* has hidden_size 2560; give the drafter"),
        ({"vocab_size": 248320}, "vocab_size is 248320, but .* has vocab_size 151936"),
        ({"num_target_layers": 40}, "num_target_layers is 40, but .* has num_hidden_layers 36"),
        ({"target_layer_ids": (1, 9, 40)}, "tap 2 is the state behind layer 40, but the target has 36"),
        ({"mask_token_id": 151936}, "mask_token_id is 151936, but the target embeds 151936 tokens"),
    ],
)
def test_refuses_a_pair(pair: tuple[Path, Path], changes: dict[str, Any], message: str) -> None:
    target, drafter = read_target_config(pair[0]), read_drafter_config(pair[1])
    with pytest.raises(PairError, match=rf"drafter.config\.json: .*{message}"):
        check_pair(target, replace(drafter, **changes))


def test_taps_keep_their_order(pair: tuple[Path, Path]) -> None:
    write(pair[1], DRAFTER | {"dflash_config": {"mask_token_id": 151669, "target_layer_ids": [33, 1]}})
    drafter = read_drafter_config(pair[1])
    check_pair(read_target_config(pair[0]), drafter)
    assert drafter.target_layer_ids == (33, 1)


def with_vocab(vocab: object) -> dict[str, Any]:
    return TOKENIZER | {"model": TOKENIZER["model"] | {"vocab": vocab}}


@pytest.mark.parametrize(
    ("target", "drafter", "message"),
    [
        (with_vocab({"a": 0, "mask": 151669}), None, '151669, but in .* that is the ordinary token "mask"'),
        (with_vocab({"a": 0, "b": 151936}), None, 'token "b" has id 151936, but vocab_size is 151936'),
        (TOKENIZER, with_vocab({"a": 0, "b": 2, "ab": 1}), 'token "ab" has id 1, but in .* it has 2'),
        (TOKENIZER, with_vocab({"a": 0, "b": 1}), 'token "<.endoftext.>" has id 2, but in .* it has 3'),
        *(
            (malformed, None, "tokenizer.json: not a readable tokenizer")
            for malformed in (
                with_vocab({"a": 0, "b": True}),
                with_vocab(None),
                {},
                TOKENIZER | {"added_tokens": [3]},
                TOKENIZER | {"added_tokens": [{"content": "x"}]},
            )
        ),
        (TOKENIZER, {}, "tokenizer.json: not a readable tokenizer"),
    ],
)
def test_refuses_tokenizers(
    pair: tuple[Path, Path], target: dict[str, Any], drafter: dict[str, Any] | None, message: str
) -> None:
    write(pair[0], target, "tokenizer.json")
    if drafter is not None:
        write(pair[1], drafter, "tokenizer.json")
    with pytest.raises((PairError, CheckpointError), match=message):
        check_tokenizers(*pair, read_drafter_config(pair[1]).mask_token_id)


def test_accepts_tokenizers(pair: tuple[Path, Path]) -> None:
    mask = {"id": 151669, "content": "<|MASK|>", **PLAIN}
    with_mask = TOKENIZER | {"added_tokens": [*TOKENIZER["added_tokens"], mask]}
    for directory in pair:
        write(directory, with_mask, "tokenizer.json")
    check_tokenizers(*pair, read_drafter_config(pair[1]).mask_token_id)
    for directory in pair:
        unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], ["b", -2.0]]}
        write(directory, TOKENIZER | {"model": unigram}, "tokenizer.json")
    check_tokenizers(*pair, read_drafter_config(pair[1]).mask_token_id)
    (pair[0] / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not found"):
        check_tokenizers(*pair, read_drafter_config(pair[1]).mask_token_id)


def test_the_table_claims_only_what_can_be_read() -> None:
    families = {family.model_type.removesuffix("_text") for family in FAMILIES.values()}
    assert {pair.family.removesuffix("_text") for pair in PAIRS} <= families
    assert len({pair.name for pair in PAIRS}) == len(PAIRS)
    for pair in PAIRS:
        assert pair.target_repo is not None or pair.drafter_repo is None


def test_a_directory_wins(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pair[0].parent)
    (pair[0].parent / "qwen3-8b").mkdir()
    (pair[0].parent / "qwen3-8b" / "config.json").write_text("{}")
    assert resolve("qwen3-8b", "target") == Source(Path("qwen3-8b"))
    assert find_sources("target", "drafter", "copy") == (Source(Path("target")), Source(Path("drafter")))
    assert find_sources("target", None, "copy")[1] is None


def test_other_forms_of_a_target_have_its_drafter() -> None:
    for name in ("qwen3.8-27b-fp8", "Qwen/Qwen3.8-27B-FP8", "qwen/qwen3.8-27b-fp8@main"):
        pair = known_pair(name)
        assert pair is not None
        assert (pair.name, pair.target_repo) == ("qwen3.8-27b-fp8", "Qwen/Qwen3.8-27B-FP8")
        assert pair.drafter_repo == "z-lab/Qwen3.8-27B-DFlash2"
    with pytest.raises(CheckpointError, match=r"Gemma-4-31B-IT-NVFP4 does not come with the package; give"):
        known_configs("gemma-4-31b-nvfp4")


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.drafter_repo], ids=lambda pair: pair.name)
def test_the_list_says_which_engines_take_a_pair(pair: KnownPair) -> None:
    """As TensorRT-LLM's part of a build decides from the configurations."""
    assert pair.drafter_repo is not None
    drafter = find_drafter(pair.drafter_repo)
    assert drafter is not None
    refusing = {each.name for each in registry.engines() if each.refuses_published(drafter, None)}
    folders = known_configs(pair.name)
    target, _ = registry.find("tensorrt-llm").read_pair(*folders)
    hybrid = bool(target.delta_layers) and target.architecture not in HYBRIDS
    assert refusing == ({"tensorrt-llm"} if hybrid else set())


def test_shipped_pairs_come_from_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "SHIPPED", tmp_path / "shipped")
    with pytest.raises(CheckpointError, match="the installation is incomplete"):
        find_sources("tiny", None, "copy")
    for role in ("target", "drafter"):
        (tmp_path / "shipped" / "tiny" / role).mkdir(parents=True)
    shipped = tmp_path / "shipped" / "tiny"
    assert find_sources("tiny", None, "copy") == (Source(shipped / "target"), Source(shipped / "drafter"))


def test_a_shipped_drafter_is_found_by_its_targets_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's weights are not shipped: they come from a package, or from the hub."""
    monkeypatch.chdir(tmp_path)
    found: list[str] = []

    def converted(file: Path, *, stored: bool) -> Path:
        found.append(str(file))
        return tmp_path / "converted"

    monkeypatch.setattr(sources.gguf, "packaged_target", lambda name: tmp_path / name)
    monkeypatch.setattr(sources.gguf, "cached_checkpoint", converted)
    drafter = Source(sources.SHIPPED / "smollm2-135m" / "drafter")
    assert find_sources("smollm2-135m", None, "copy") == (Source(tmp_path / "converted"), drafter)
    assert found == [str(tmp_path / "smollm2-135m")]
    monkeypatch.setattr(sources, "_snapshot", lambda *asked: asked)
    repository = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert find_sources(repository, None, "copy") == ((repository, None, "target"), drafter)
    assert read_drafter_config(drafter.directory).block_size == 8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny@main", "neither a directory"),
        ("nobody", "neither a directory, nor a hub repository .*, nor a known pair: tiny, tiny-gpt-oss"),
        ("./a/b", "no such file or directory"),
        ("../x", "no such file or directory"),
        ("a/b/c", "no such file or directory"),
    ],
)
def test_refuses_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        resolve(name, "target")
