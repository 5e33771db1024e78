"""Train the target of a shipped pair: `tiny` from nothing, or `tiny-gpt-oss` from the `tiny` that is there.

    python -m build_scripts.train.target --out DIR                 a stopped run continues where it was
    python -m build_scripts.train.target --out DIR --architecture gpt-oss

That is: tokenizer and target; `DIR/target` is the checkpoint. Minutes are wall time; data depend on the step alone.
The drafter comes from `dflash-trt train`, as for any other target. Its first bundle needs a drafter of the right
sizes; the shipped one of `tiny` is:

    python -m build_scripts.corpus.corpus --count 5000 --out prompts.jsonl
    dflash-trt build --target DIR/target --drafter tiny --out bundles/first
    dflash-trt train regenerate --bundle bundles/first --prompts prompts.jsonl --out answers.jsonl
    dflash-trt train drafter --target DIR/target --data answers.jsonl --out runs/tiny --steps 1200 \\
        --taps 1,3,5,7 --optimizer muon --learning-rate 1e-2

For gpt-oss, `DIR/beginning` is the drafter to build and to go on from: `--drafter DIR/beginning`, and `--from
DIR/beginning` in place of `--taps`.

The shipped pairs were made on a machine with 2 CPU cores that other jobs used at the same time. Their drafters are
older than `dflash-trt train`. A program trained them that the history of this folder has. It had the same loss
(exponential decay, gamma 4), packed rows and a Muon of its own. dflash_trt/shipped/tiny:

    target    4.33 M parameters: 10 layers of 192, vocabulary 2048; 8.7 MB in BF16
              74 minutes, 1750 steps of 4096 tokens (7 M tokens), in stretches: the first 1380 steps on one cosine,
              whose length was extended while it ran, the rest on a second one from half the rate. The shares of the
              kinds of text moved from chat to math and tools on the way; up to step 800 packed documents saw each
              other.
              Last loss 0.18 (answers weigh 1, prompts 0.1, library text 0.3).
    answers   to 5000 training prompts, 70 % greedy, 8 minutes
    drafter   0.94 M parameters: 2 layers, 4 taps, block 8; 1.9 MB in BF16
              12 minutes, 1150 steps of 384 blocks; last loss 0.16

Greedy, 64 held-out prompts each (float32):

                                        math    code    tools   chat
    mean acceptance length, block 8     6.22    7.15    6.98    5.56
    tokens per answer                   95      91      74      62
    answers that end                    100 %   100 %   100 %   100 %
    answers equal to the corpus's       50 %    95 %    17 %    66 %

So the target always keeps the form of an answer, but copies some words and digits wrongly: it saw few tokens.

The pair in dflash_trt/shipped/tiny-gpt-oss, on the same machine in one go (30 minutes for the target, 18 for the
drafter, 4500 answers; other jobs were running):

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
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from build_scripts.train.architecture import ARCHITECTURES, Architecture
from build_scripts.train.data import load_tokenizer, packed_rows
from build_scripts.train.loop import Budget, join_workers, optimizers_of, rank, run_workers, train

SEQUENCE = 512


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
        optimizers_of(target, *make.rates),
        loss_of,
        token_batches(),
        budget,
        out / "target_training",
    )
    if rank() == 0:
        print(f"target: loss {loss:.4f}", flush=True)
        make.write_target(target, out / "tokenizer.json", out / "target")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--architecture", default="qwen3", choices=ARCHITECTURES)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--minutes", type=float, default=60, help="wall time of the training")
    parser.add_argument("--steps", type=int, default=0, help="steps instead of minutes")
    parser.add_argument("--workers", type=int, default=2, help="processes on a CPU, one thread each")
    arguments = parser.parse_args()
    out, device = arguments.out, arguments.device
    workers = arguments.workers if device == "cpu" else 1
    out.mkdir(parents=True, exist_ok=True)
    make = ARCHITECTURES[arguments.architecture]()
    if join_workers():
        train_target(out, make, Budget(arguments.minutes, arguments.steps), 8 // workers, device)
        return
    if not (out / "tokenizer.json").exists():
        make.new_tokenizer().save(str(out / "tokenizer.json"))
    if make.begin_drafter is not None:
        make.begin_drafter(out / "beginning")
    if not (out / "target" / "tokenizer_config.json").exists():
        run_workers(["-m", "build_scripts.train.target", *sys.argv[1:]], workers, out / "meeting")


if __name__ == "__main__":
    main()
