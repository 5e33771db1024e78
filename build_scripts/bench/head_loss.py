"""CPU time of the loss and its gradient, with all tokens of a vocabulary and with some of them (--head-tokens).

python -m build_scripts.bench.head_loss
"""

from __future__ import annotations

import time

import torch

from dflash_trt.training.blocks import head_loss
from dflash_trt.training.head_sample import draw_head
from dflash_trt.training.target import matrix_dtype

# SmolLM2-135M's head, blocks of 8, and labels of 3,000 different tokens.
VOCABULARY, WIDTH, BLOCKS, SIZE, DIFFERENT = 49_152, 576, 128, 8, 3000


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = torch.randn(VOCABULARY, WIDTH).to(matrix_dtype(torch.device("cpu")))
    hidden = torch.randn(BLOCKS, SIZE, WIDTH, requires_grad=True)
    labels = torch.randint(DIFFERENT, (BLOCKS, SIZE))
    valid = torch.arange(SIZE).expand(BLOCKS, -1) > 0
    for tokens in (VOCABULARY, 16_384, 8192):
        seconds = []
        for _ in range(3):
            began = time.process_time()
            sample = draw_head(labels[valid], torch.arange(VOCABULARY), tokens, torch.Generator())
            part, wanted = head[sample.ids], sample.labels(labels)
            loss, _ = head_loss(
                hidden, part, wanted, valid, "dpace", 16 * VOCABULARY // len(part), sample.bias
            )
            loss.backward()
            seconds.append(time.process_time() - began)
        print(f"{tokens} tokens: {min(seconds):.2f} s of CPU time for {BLOCKS} blocks", flush=True)


if __name__ == "__main__":
    main()
