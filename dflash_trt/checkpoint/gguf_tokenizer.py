"""Convert the tokenizer of a GGUF file to Hugging Face's form: tokenizer.json, tokenizer_config.json, chat template.

A GGUF file only names its pre-tokenizer (`tokenizer.ggml.pre`). This module holds the patterns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.errors import CheckpointError, quoted, show_name

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TOKENS = "tokenizer.ggml.tokens"
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Control tokens that end an answer even if the metadata names another EOS (as in llama.cpp).
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


def _split(digits: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2(*, single_digits: bool) -> Any:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if not single_digits:
        return words
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])


# tokenizer.ggml.pre -> pre-tokenizer before BPE, and whether whole words of the vocabulary skip the merges.
_PRE: dict[str, tuple[Callable[[], Any], bool]] = {
    "smollm": (lambda: _gpt2(single_digits=True), False),
    "gpt-2": (lambda: _gpt2(single_digits=False), False),
    "qwen2": (lambda: _split(""), False),
    "llama-bpe": (lambda: _split("{1,3}"), True),
}


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens that end an answer. The file's EOS comes first."""
    named = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    types = metadata.get("tokenizer.ggml.token_type") or ()
    known = [
        index
        for index, (token, kind) in enumerate(zip(metadata.get(_TOKENS) or (), types, strict=False))
        if kind == _CONTROL and token in _ENDS
    ]
    return list(dict.fromkeys([i for i in named if isinstance(i, int)] + known))


def write_tokenizer(file: Path, metadata: Mapping[str, Any], directory: Path) -> None:
    """Write the tokenizer files for a GGUF file with this metadata into `directory`.

    Raises CheckpointError if the tokenizer is not byte-level BPE or its pre-tokenizer is unknown.
    """
    fields = Fields(file, metadata)
    fields.string("tokenizer.ggml.model", among=("gpt2",))  # byte-level BPE
    pre = fields.string("tokenizer.ggml.pre", among=_PRE)
    tokens, merges = _texts(file, metadata, _TOKENS), _texts(file, metadata, "tokenizer.ggml.merges")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"{file}: tokenizer.ggml.token_type must have one entry per token")
    make, ignore_merges = _PRE[pre]
    vocabulary = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    pairs = [_pair(file, merge) for merge in merges]
    try:
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(
            f"{file}: the tokenizer's merges and tokens do not fit: {show_name(str(error))}"
        ) from error
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = make()
    tokenizer.decoder = decoders.ByteLevel()
    special = {t for t, kind in zip(tokens, types, strict=True) if kind in (_UNKNOWN, _CONTROL)}
    added = [t for t, kind in zip(tokens, types, strict=True) if t in special or kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(t, special=t in special, normalized=False) for t in added])
    roles = _roles(fields, tokens)
    bos = roles.get("bos_token")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(f"{bos} $A", None, [(bos, vocabulary[bos])]),
            ]
        )
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        **roles,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _texts(file: Path, metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{file}: {key} is missing or not a list of texts")
    return values


def _pair(file: Path, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise CheckpointError(f"{file}: tokenizer.ggml.merges has {quoted(merge)}, expected two tokens")
    return left, right


def _roles(fields: Fields, tokens: list[str]) -> dict[str, str]:
    """bos_token, eos_token and similar, as text."""
    roles = {}
    for name, role in _ROLES.items():
        key = f"tokenizer.ggml.{name}_token_id"
        if fields.get(key) is not None:
            roles[role] = tokens[fields.integer(key, minimum=0, maximum=len(tokens) - 1)]
    return roles
