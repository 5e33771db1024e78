"""Tokenizer and packed token rows for training the target."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from build_scripts.corpus.corpus import CATEGORIES, Example, example, library_documents

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>")
# Qwen3's pattern: contractions, words, single digits, punctuation, newlines, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DOCUMENT_SHARES = {"math": 0.40, "code": 0.20, "tools": 0.23, "chat": 0.13, "library": 0.04}
# An example -> its prompt, and its answer with its end.
Render = Callable[[Example], tuple[str, str]]
PROMPT_WEIGHT, ANSWER_WEIGHT, LIBRARY_WEIGHT = 0.1, 1.0, 0.3


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE over every category and the library. Each digit is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [
        made.prompt + made.answer for kind in CATEGORIES for made in (example(kind, i) for i in range(2500))
    ]
    texts += library_documents(1_500_000)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def chatml(example: Example) -> tuple[str, str]:
    return example.prompt, example.answer + "<|im_end|>\n"


def load_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def encode_examples(tokenizer: Tokenizer, made: list[Example], render: Render) -> list[tuple[list[int], int]]:
    """Token ids of each example, and the number of prompt tokens."""
    texts = [render(item) for item in made]
    prompts = tokenizer.encode_batch_fast([prompt for prompt, _ in texts])
    answers = tokenizer.encode_batch_fast([answer for _, answer in texts])
    return [(p.ids + a.ids, len(p.ids)) for p, a in zip(prompts, answers, strict=True)]


def documents(tokenizer: Tokenizer, seed: int, render: Render) -> Iterator[tuple[list[int], list[float]]]:
    """Endless training documents: token ids and the loss weight of each token."""
    rng = random.Random(f"documents/{seed}")
    library = [text.splitlines(keepends=True) for text in library_documents()]
    counters = dict.fromkeys(CATEGORIES, seed * 10_000_000)
    while True:
        made: list[Example] = []
        ready: list[tuple[list[int], list[float]]] = []
        for kind in rng.choices(list(DOCUMENT_SHARES), list(DOCUMENT_SHARES.values()), k=512):
            if kind == "library":
                lines = rng.choice(library)
                first = rng.randrange(max(1, len(lines) - 30))
                ids = tokenizer.encode("".join(lines[first : first + 40]) + "<|endoftext|>").ids[-400:]
                ready.append((ids, [LIBRARY_WEIGHT] * len(ids)))
                continue
            while (candidate := example(kind, counters[kind])).held_out:
                counters[kind] += 1
            counters[kind] += 1
            made.append(candidate)
        for ids, prompt_length in encode_examples(tokenizer, made, render):
            answer_length = len(ids) - prompt_length
            ready.append((ids, [PROMPT_WEIGHT] * prompt_length + [ANSWER_WEIGHT] * answer_length))
        rng.shuffle(ready)
        yield from ready


def packed_rows(
    tokenizer: Tokenizer, length: int, seed: int, render: Render = chatml
) -> Iterator[tuple[np.ndarray, ...]]:
    """Endless rows of documents: tokens and loss weights, both length + 1, and each token's document and position.

    A row starts with the start of a document, and its last document is cut. The first token of a document has weight
    0, because nothing before it predicts it.
    """
    rows: list[tuple[int, float, int, int]] = []
    for number, (ids, weights) in enumerate(documents(tokenizer, seed, render)):
        weights[0] = 0.0
        rows += zip(ids, weights, [number] * len(ids), range(len(ids)), strict=True)
        if len(rows) > length:
            tokens, scales, document, position = zip(*rows[: length + 1], strict=True)
            yield np.array(tokens), np.array(scales, np.float32), np.array(document), np.array(position)
            rows = []
