"""The pairs of the tests of `LLM`: random ones, and the shipped ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import dflash_trt
from dflash_trt import LLM, Completion, SamplingParams
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.sampling.sampler import sample
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.reference import Choose

CHUNK, SLOTS, MAX_SEQ_LEN = 16, 3, 160
SLIDING, FULL = "sliding_attention", "full_attention"

# name: (target, drafter). The drafts of the first two are sometimes right, those of the third almost never.
RANDOM: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lucky": ({"favourites": 6}, {}),
    "windows": (
        {"favourites": 4, "sliding_window": 20, "attention_bias": True, "seed": 2},
        {"layer_types": (SLIDING, FULL), "sliding_window": 9, "attention_bias": True},
    ),
    "unlucky": ({"tie": True}, {}),
}
TEXT = "Tom has 12 apples and buys 7 more. How many apples does Tom have now?\n\ndef add(a, b):\n    return a + b\n"
SHIPPED = {name: Path(dflash_trt.__file__).parent / "shipped" / name for name in ("tiny", "tiny-gpt-oss")}
PAIRS = [*RANDOM, *SHIPPED]

SAMPLING = {
    "greedy": SamplingParams(),
    "0.7": SamplingParams(temperature=0.7, top_p=0.95, seed=11),
    "1.0": SamplingParams(temperature=1.0, top_p=0.95, seed=2**63 + 12),
    "everything": SamplingParams(
        temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.1, seed=13,
    ),
    "penalized greedy": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2),
}  # fmt: skip


@dataclass
class Pair:
    name: str
    target: Path
    drafter: Path
    llm: LLM

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        if self.name in SHIPPED:
            return (self.llm.tokenizer.encode(TEXT) * 9)[seed : seed + length]
        vocab = self.llm.bundle.manifest["vocab_size"]
        return np.random.default_rng(seed).integers(0, vocab, length).tolist()

    def plain(self, prompt: list[int], params: SamplingParams) -> Completion:
        return self.llm.generate(prompt, params, speculate=False)


def make(directory: Path, target: dict[str, Any], drafter: dict[str, Any]) -> tuple[Path, Path]:
    """A random pair of checkpoints."""
    make_target(directory / "target", **target)
    return directory / "target", make_drafter(directory / "drafter", directory / "target", **drafter)


def chooser(params: SamplingParams, prompt: list[int]) -> Choose:
    """The product's own sampling on the oracle's logits."""

    def choose(logits: Any, position: int, tokens: list[int]) -> int:
        history = None
        if params.adjusted:
            history = History(params, prompt)
            for token in tokens[len(prompt) :]:
                history.add(token)
        return sample(logits.numpy(), params, params.seed or 0, position, history)

    return choose
