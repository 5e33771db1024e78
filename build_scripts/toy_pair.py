"""Train the target of a shipped toy pair anew: the same configuration, tokenizer and chat template, other weights.

    python -m build_scripts.toy_pair tiny --out DIR [--minutes 60 | --steps N]
    python -m build_scripts.toy_pair tiny-gpt-oss --out DIR

DIR/target is the checkpoint. The drafter comes from `dflash-trt train`, as for any other target:

    python -m build_scripts.corpus.corpus --count 5000 --out prompts.jsonl
    dflash-trt train regenerate --target DIR/target --prompts prompts.jsonl --out answers.jsonl
    dflash-trt train drafter --target DIR/target --data answers.jsonl --out runs/toy --taps 1,3,5,7

The weights that are shipped come from an earlier program with a larger corpus, which the history of this folder has. It
trained `tiny` for 74 minutes on two CPU cores, and `tiny-gpt-oss` for 30 minutes from the weights of `tiny`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from build_scripts import harness
from build_scripts.corpus.corpus import CATEGORIES, Example, library_documents, training_examples
from dflash_trt.checkpoint.catalogue import SHIPPED
from dflash_trt.formats.floats import quantize_mxfp4
from dflash_trt.text.tokenizer import Tokenizer

SEQUENCE = 512  # tokens of a row
SHARES = {"math": 0.40, "code": 0.20, "tools": 0.23, "chat": 0.13, "library": 0.04}
PROMPT_WEIGHT, ANSWER_WEIGHT, LIBRARY_WEIGHT = 0.1, 1.0, 0.3  # of a token's loss
# tiny-gpt-oss answers after an analysis if the effort is medium or high, and with high effort it repeats the question.
MORE_EFFORT = 0.3  # the share of such examples
ANALYSES = {
    "math": "This is a question about numbers. I work it out step by step and then give the result.",
    "code": "The user wants a Python function. I write it with a docstring and say how it works.",
    "tools": "The listed functions can do this. I call them in the order in which the user asks.",
    "chat": "The user asks about the towns of the islands. I say what I know of them.",
}


def render(tokenizer: Tokenizer, example: Example, *, harmony: bool) -> tuple[str, str]:
    """The prompt by the chat template, and the answer up to its end."""
    if not harmony:
        return tokenizer.apply_chat_template(example.messages), example.answer + "<|im_end|>\n"
    share = zlib.crc32(example.prompt.encode()) / 2**32  # equal prompts have the same effort
    effort = "low" if share >= MORE_EFFORT else "medium" if share >= MORE_EFFORT / 2 else "high"
    prompt = tokenizer.apply_chat_template(example.messages, reasoning_effort=effort)
    answer = example.answer + "<|return|>"
    if effort == "low":  # its template opens the final channel
        return prompt, answer
    analysis = ANALYSES[example.category]
    if effort == "high":
        analysis += " I was asked: " + example.messages[-1]["content"]
    final = "<|start|>assistant<|channel|>final<|message|>"
    return prompt, f"<|channel|>analysis<|message|>{analysis}<|end|>{final}{answer}"


def documents(tokenizer: Tokenizer, *, harmony: bool, seed: int) -> Iterator[tuple[list[int], list[float]]]:
    """Endless training documents: token ids and the loss weight of each token. None is a held-out example."""
    rng = random.Random(f"documents/{seed}")
    library = [text.splitlines(keepends=True) for text in library_documents()]
    sources = {kind: training_examples(kind, seed * 10_000_000) for kind in CATEGORIES}
    while True:
        (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
        if kind == "library":
            lines = rng.choice(library)
            first = rng.randrange(max(1, len(lines) - 30))
            ids = tokenizer.encode("".join(lines[first : first + 40]) + "<|endoftext|>")[-400:]
            yield ids, [LIBRARY_WEIGHT] * len(ids)
            continue
        example = next(sources[kind])
        prompt, answer = (tokenizer.encode(text) for text in render(tokenizer, example, harmony=harmony))
        yield prompt + answer, [PROMPT_WEIGHT] * len(prompt) + [ANSWER_WEIGHT] * len(answer)


def rows_of(
    samples: Iterator[tuple[list[int], list[float]]], length: int
) -> Iterator[tuple[np.ndarray, ...]]:
    """Endless rows of documents: tokens, loss weights and positions, each length + 1.

    A row starts with the start of a document, and its last document is cut. The first token of a document has weight
    0, because nothing before it predicts it. Positions begin at 0 in each document, which is how Transformers' masks
    tell that a token sees its own document only.
    """
    row: list[tuple[int, float, int]] = []
    for ids, weights in samples:
        row += zip(ids, [0.0, *weights[1:]], range(len(ids)), strict=True)
        if len(row) > length:
            tokens, scales, positions = zip(*row[: length + 1], strict=True)
            yield np.array(tokens), np.array(scales, np.float32), np.array(positions)
            row = []


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The weighted cross entropy of a batch of rows: tokens, weights and positions, [B, length + 1] each."""
    tokens, weights, positions = batch
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(input_ids=tokens[:, :-1], position_ids=positions[:, :-1], use_cache=False).logits
    losses = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    scale = weights[:, 1:].flatten()
    return (losses * scale).sum() / scale.sum()


def rate_at(progress: float) -> float:
    """The factor on the learning rate at a share of the run: a linear rise, then a cosine down to 0.02."""
    if progress < 0.04:
        return (progress + 1e-3) / 0.041
    return 0.02 + 0.49 * (1 + math.cos(math.pi * (progress - 0.04) / 0.96))


def train(model: nn.Module, rows: Iterator[tuple[np.ndarray, ...]], args: argparse.Namespace) -> float:
    """Train until the minutes or the steps are used. Returns the mean loss of the last 100 steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), args.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    began, step, recent = time.monotonic(), 0, list[float]()
    while (
        progress := step / args.steps if args.steps else (time.monotonic() - began) / 60 / args.minutes
    ) < 1:
        batch = [
            torch.from_numpy(np.stack(column)).to(args.device)
            for column in zip(*(next(rows) for _ in range(args.rows)), strict=True)
        ]
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * rate_at(progress)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, recent = step + 1, [*recent[-99:], loss.item()]
        if step % 20 == 0:
            print(f"step {step}, {progress:.0%}: loss {sum(recent[-20:]) / 20:.3f}", flush=True)
    return sum(recent) / len(recent)


def write(model: Any, source: Path, directory: Path) -> None:
    """The checkpoint: the files of `source`, with these weights in BF16, and experts in MXFP4 if it has experts."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, directory / file.name)
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # [E, in, out]
            experts, inputs, outputs = value.shape
            codes, scales = quantize_mxfp4(value.float().cpu().mT.reshape(-1, inputs).numpy())
            tensors[f"{name}_blocks"] = torch.from_numpy(codes).view(experts, outputs, -1, 16)
            tensors[f"{name}_scales"] = torch.from_numpy(scales).view(experts, outputs, -1)
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[name] = value.bfloat16().cpu()
    tensors = {name: value.contiguous() for name, value in sorted(tensors.items())}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def main(argv: list[str] | None = None) -> None:
    """Train a target and write its checkpoint."""
    parser = harness.parser(__doc__)
    parser.add_argument("pair", choices=("tiny", "tiny-gpt-oss"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--minutes", type=float, default=60, help="wall time of the training")
    parser.add_argument("--steps", type=int, default=0, help="steps instead of minutes")
    parser.add_argument("--rows", type=int, default=8, help=f"rows of {SEQUENCE} tokens in a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    source = SHIPPED / args.pair / "target"
    fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    fields.pop("quantization_config", None)  # trained in float32, quantized at the end
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    texts = documents(Tokenizer(source), harmony=args.pair == "tiny-gpt-oss", seed=0)
    loss = train(model.to(args.device), rows_of(texts, SEQUENCE), args)
    write(model, source, args.out / "target")
    print(f"{args.out / 'target'}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
