"""Log-probabilities of rows of logits on the device: what `log_probabilities` in sampling/sampler.py gives on the host,
but for the order of a sum.
"""

from __future__ import annotations

import torch

from dflash_trt.decoding.params import MOST_LOGPROBS

Tensor = torch.Tensor


class LogProbabilities:
    """memory: bytes that its work may overwrite. most: rows of a sequence. rows: those that fit into the memory at a
    time; 0: the host must do the work. top: how many tokens of a row are ranked.
    """

    def __init__(self, memory: Tensor, most: int, vocab: int) -> None:
        device, size = memory.device, (8 + 4) * vocab
        self.rows, self.top = min(memory.numel() // size, most), min(MOST_LOGPROBS, vocab)
        keys, rest = memory[: self.rows * size].split([8 * self.rows * vocab, 4 * self.rows * vocab])
        self._keys = keys.view(torch.int64).view(self.rows, vocab)
        self._distance = rest.view(torch.float32).view(self.rows, vocab)
        self._ids = torch.arange(vocab, device=device)
        self._largest, self._total = (torch.zeros(self.rows, 1, device=device) for _ in range(2))
        self._best = torch.zeros(self.rows, self.top, dtype=torch.int64, device=device)

    def fill(self, logits: Tensor, chosen: Tensor, logprobs: Tensor, tokens: Tensor, best: Tensor) -> None:
        """Of rows [R, V] float32: those of the tokens `chosen` [R] into `logprobs` [R], and the most probable tokens,
        best first, with theirs into `tokens` and `best` [R, top]. Lower token ids come first among equals.
        """
        parts = (
            array.split(self.rows) for array in (logits, chosen[:, None], logprobs[:, None], tokens, best)
        )
        for x, decided, mine, ranked, theirs in zip(*parts, strict=True):
            distance, keys, largest, total, least = (
                array[: len(x)]
                for array in (self._distance, self._keys, self._largest, self._total, self._best)
            )
            torch.amax(x, 1, keepdim=True, out=largest)
            torch.sub(largest, x, out=distance)
            # The bits of numbers that are not negative are in their order.
            torch.add(self._ids, distance.view(torch.int32), alpha=2**32, out=keys)
            torch.topk(keys, self.top, largest=False, out=(least, ranked))
            torch.sum(distance.neg_().exp_(), 1, keepdim=True, out=total).log_()
            torch.gather(x, 1, decided, out=mine).sub_(largest).sub_(total)
            torch.gather(x, 1, ranked, out=theirs).sub_(largest).sub_(total)
