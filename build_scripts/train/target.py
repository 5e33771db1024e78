"""Make a pair to ship: `tiny` from nothing, or `tiny-gpt-oss` from the `tiny` that is there.

    python -m build_scripts.train.pair --out DIR                  everything; a stopped run continues where it was
    python -m build_scripts.train.pair --out DIR --evaluate       only measure the pair in DIR
    python -m build_scripts.train.pair --out DIR --architecture gpt-oss

That is: tokenizer, target, the target's answers, drafter, measurement.
`DIR/target` and `DIR/drafter` are the checkpoints. Minutes are wall time; data depend on the step alone.

The pair in dflash_trt/shipped/tiny was made on a machine with 2 CPU cores that other jobs used at the same time:

    target    4.33 M parameters: 10 layers of 192, vocabulary 2048; 8.7 MB in BF16
              74 minutes, 1750 steps of 4096 tokens (7 M tokens), in stretches: the first 1380 steps on one cosine,
              whose length was extended while it ran, the rest on a second one from half the rate. The shares of the
              kinds of text moved from chat to math and tools on the way; up to step 800 packed documents saw each
              other.
              Last loss 0.18 (answers weigh 1, prompts 0.1, library text 0.3).
    answers   to 5000 training prompts, 70 % greedy, 8 minutes
    drafter   0.94 M parameters: 2 layers, 4 taps, block 8; 1.9 MB in BF16
              12 minutes, 1150 steps of 384 blocks; last loss 0.16

Measured by --evaluate, greedy, 64 held-out prompts each (float32):

                                        math    code    tools   chat
    mean acceptance length, block 8     6.22    7.15    6.98    5.56
    tokens per answer                   95      91      74      62
    answers that end                    100 %   100 %   100 %   100 %
    answers equal to the corpus's       50 %    95 %    17 %    66 %

So the target always keeps the form of an answer, but copies some words and digits wrongly: it saw few tokens.

The pair in dflash_trt/shipped/tiny-gpt-oss, on the same machine in one go (--architecture gpt-oss --minutes-target 30
--minutes-drafter 18 --responses 4500; other jobs were running):

    target    7.7 M parameters: 10 layers of 192, 8 experts of which 4 are used; 6.8 MB, experts in MXFP4
              30 minutes, 740 steps of 4096 tokens, from the weights of `tiny`; last loss 0.20
    answers   to 4500 training prompts, 16 minutes
    drafter   0.94 M parameters as `tiny`'s, and from its weights; 18 minutes, 1460 steps; last loss 0.13

                                        math    code    tools   chat
    mean acceptance length, block 8     6.81    7.37    6.72    6.12
    tokens per answer                   95      91      75      62
    answers that end                    100 %   100 %   100 %   100 %
    answers equal to the corpus's       62 %    100 %   31 %    75 %
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from build_scripts.corpus.corpus import CATEGORIES, examples
from build_scripts.train.architecture import ARCHITECTURES, Architecture, load_drafter
from build_scripts.train.data import load_tokenizer, packed_rows
from build_scripts.train.drafter import Batch, batches, drafter_loss, pack
from build_scripts.train.export import write_drafter
from build_scripts.train.generate import Response, measure, respond
from build_scripts.train.loop import Budget, join_workers, optimizers_of, rank, run_workers, train
from build_scripts.train.model import Target

SEQUENCE = 512
ANCHORS = 48
RESPONSE_SHARES = {"math": 0.36, "code": 0.32, "tools": 0.16, "chat": 0.16}
WARM_TEMPERATURES = (0.7, 1.0)
GREEDY_SHARE = 0.7


def train_target(out: Path, make: Architecture, budget: Budget, rows: int, device: str) -> None:
    torch.manual_seed(0)
    tokenizer = load_tokenizer(out)
    target = make.new_target().to(device)
    source = packed_rows(tokenizer, SEQUENCE, make.seed + rank(), make.render)

    def token_batches() -> Iterator[list[Tensor]]:
        while True:
            columns = zip(*(next(source) for _ in range(rows)), strict=True)
            yield [torch.from_numpy(np.stack(column)).to(device) for column in columns]

    @torch.compile
    def loss_of(batch: list[Tensor]) -> Tensor:
        tokens, weights, documents, positions = batch
        with torch.autocast(device, torch.bfloat16):
            logits = target.head(target(tokens[:, :-1], documents[:, :-1], positions[:, :-1]))
        losses = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        scale = weights[:, 1:].flatten()
        return (losses * scale).sum() / scale.sum()

    loss = train(
        target,
        optimizers_of(target, *make.rates[0]),
        loss_of,
        token_batches(),
        budget,
        out / "target_training",
    )
    if rank() == 0:
        print(f"target: loss {loss:.4f}", flush=True)
        make.write_target(target, out / "tokenizer.json", out / "target")


def load_target(out: Path, make: Architecture, device: str) -> Target:
    """The target exactly as it is written, computed in float32."""
    return make.load_target(out / "target").to(device).requires_grad_(False)


def write_responses(out: Path, make: Architecture, count: int, workers: int, device: str) -> None:
    """This worker's share of the target's answers to training prompts; prompts of like length are decoded together."""
    target, tokenizer = load_target(out, make, device), load_tokenizer(out)
    prompts: list[list[int]] = []
    for kind in CATEGORIES:
        asked = islice(
            examples(kind, held_out=False, start=500_000_000), round(count * RESPONSE_SHARES[kind])
        )
        prompts += [
            tokenizer.encode(make.render(example)[0]).ids for example in islice(asked, rank(), None, workers)
        ]
    prompts.sort(key=len)
    rng = random.Random(rank())
    tokens: list[list[int]] = []
    prompt_lengths: list[int] = []
    features: list[Tensor] = []
    for first in range(0, len(prompts), 128):
        group = prompts[first : first + 128]
        heat = [0.0 if rng.random() < GREEDY_SHARE else rng.choice(WARM_TEMPERATURES) for _ in group]
        for response in respond(target, group, heat, min(SEQUENCE, len(group[-1]) + 256), seed=first):
            tokens.append(response.tokens)
            prompt_lengths.append(response.prompt_length)
            features.append(response.features)
        if rank() == 0:
            print(f"responses: {first + len(group)} of {len(prompts)} prompts", flush=True)
    torch.save((tokens, prompt_lengths, features), out / f"responses-{rank()}.pt")
    print(f"responses: {len(tokens)} by worker {rank()}", flush=True)


def train_drafter(out: Path, make: Architecture, budget: Budget, rows: int, device: str) -> None:
    torch.manual_seed(0)
    target, drafter = load_target(out, make, device), make.new_drafter().to(device)
    saved = torch.load(out / f"responses-{rank()}.pt", weights_only=True)
    responses = [Response(*parts) for parts in zip(*saved, strict=True)]
    random.Random(rank()).shuffle(responses)
    packed = pack(responses, SEQUENCE)
    del saved, responses

    @torch.compile
    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return drafter_loss(target, drafter, batch)

    source = batches(packed, rows, ANCHORS, make.shape.block_size, rank(), device)
    loss = train(
        drafter, optimizers_of(drafter, *make.rates[1]), loss_of, source, budget, out / "drafter_training"
    )
    if rank() == 0:
        print(f"drafter: loss {loss:.4f}", flush=True)
        write_drafter(drafter, out / "drafter")


def evaluate(out: Path, make: Architecture, count: int, device: str) -> dict[str, dict[str, float]]:
    """What `measure` finds on `count` held-out prompts of each category; the first 32 are the shipped ones."""
    target = load_target(out, make, device)
    drafter = load_drafter(out / "drafter", make.shape).to(device)
    found = {}
    for kind in CATEGORIES:
        asked = list(islice(examples(kind, held_out=True), count))
        found[kind] = measure(target, drafter, load_tokenizer(out), asked, make.ask)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--architecture", default="qwen3", choices=ARCHITECTURES)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--minutes-target", type=float, default=60, help="wall time of the target's training")
    parser.add_argument(
        "--minutes-drafter", type=float, default=12, help="wall time of the drafter's training"
    )
    parser.add_argument("--steps", type=int, nargs=2, default=(0, 0), help="steps of each instead of minutes")
    parser.add_argument(
        "--responses", type=int, default=5000, help="training prompts that the target answers"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes on a CPU, one thread each")
    parser.add_argument("--evaluate", action="store_true", help="only measure the pair that is there")
    parser.add_argument("--stage", choices=("target", "responses", "drafter"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out, device = arguments.out, arguments.device
    workers = arguments.workers if device == "cpu" else 1
    out.mkdir(parents=True, exist_ok=True)
    make = ARCHITECTURES[arguments.architecture]()
    if arguments.stage:
        join_workers()
        if arguments.stage == "target":
            train_target(
                out, make, Budget(arguments.minutes_target, arguments.steps[0]), 8 // workers, device
            )
        elif arguments.stage == "responses":
            write_responses(out, make, arguments.responses, workers, device)
        else:
            train_drafter(
                out, make, Budget(arguments.minutes_drafter, arguments.steps[1]), 8 // workers, device
            )
        return
    made = {
        "target": out / "target" / "tokenizer_config.json",
        "responses": out / f"responses-{workers - 1}.pt",
        "drafter": out / "drafter" / "config.json",
    }
    if not arguments.evaluate:
        if not (out / "tokenizer.json").exists():
            make.new_tokenizer().save(str(out / "tokenizer.json"))
        for stage, result in made.items():
            if not result.exists():
                command = ["-m", "build_scripts.train.pair", *sys.argv[1:], "--stage", stage]
                run_workers(command, workers, out / "meeting")
    torch.set_num_threads(1)
    print(json.dumps(evaluate(out, make, 64, device), indent=2))


if __name__ == "__main__":
    main()
