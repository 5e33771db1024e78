"""What a memory plan says, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.errors import BuildError

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU. `kv_bytes` and `drafter_bytes` are for `max_batch_size` sequences of `max_seq_len` tokens.

    kv_bytes_per_token, drafter_bytes_per_token: of layers that keep a row for every token.
    kv_window_bytes, drafter_window_bytes: a sequence's rows in layers with a window, once it is longer than these keep.
    state_bytes_per_sequence: of layers with Gated DeltaNet, with the rows that wait to be replayed, as often as the
        engine holds them. `kv_bytes` holds them.
    kv_fraction, kv_pool_bytes: for TensorRT-LLM, the share of free memory for its KV pool, and the pool's size.
    longest_context, largest_batch: at batch 1, and at `max_seq_len`; 0 if nothing fits.
    scratch_bytes: of `activation_bytes`, what passes write and read again, where an engine lends it to its plans.
    """

    engine: str
    gpu: str
    tensor_parallel: int
    max_seq_len: int
    max_batch_size: int
    memory_bytes: int
    weights: dict[str, dict[str, dict[str, int]]]
    weight_bytes: int
    runtime_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int
    kv_window_bytes: int
    drafter_bytes_per_token: int
    drafter_window_bytes: int
    state_bytes_per_sequence: int
    kv_bytes: int
    drafter_bytes: int
    total_bytes: int
    left_bytes: int
    kv_fraction: float | None
    kv_pool_bytes: int | None
    longest_context: int
    largest_batch: int
    scratch_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the batch and the length that were asked for fit."""
        return self.largest_batch >= self.max_batch_size

    @property
    def cache_tokens(self) -> int:
        """The tokens of `max_batch_size` sequences together that fit, where they share the memory of caches."""
        of_sequence = self.kv_window_bytes + self.drafter_window_bytes + self.state_bytes_per_sequence
        rows = self.left_bytes + self.kv_bytes + self.drafter_bytes - self.max_batch_size * of_sequence
        return max(rows, 0) // max(self.kv_bytes_per_token + self.drafter_bytes_per_token, 1)

    def arithmetic(self) -> str:
        """The sum, in GiB, as one line."""
        states = "states and " if self.state_bytes_per_sequence else ""
        context = f" + drafter context {gib(self.drafter_bytes)}" if "drafter" in self.weights else ""
        return (
            f"weights {gib(self.weight_bytes)} + runtime {gib(self.runtime_bytes)} + "
            f"activations {gib(self.activation_bytes)} + {states}KV cache of {self.max_batch_size} x "
            f"{self.max_seq_len} tokens {gib(self.kv_bytes)}{context} = "
            f"{gib(self.total_bytes)} of {gib(self.memory_bytes)} GiB"
        )

    def refuse(self) -> BuildError:
        """The error that says why the pair does not fit, and how it would fit."""
        if self.longest_context == 0:
            advice = (
                "not one sequence fits: take fewer bits (--precision), several GPUs (--engine tensorrt-llm --tp) or "
                "one with more memory"
            )
        elif self.largest_batch == 0:
            advice = f"lower --max-seq-len: at most {self.longest_context} tokens fit, at batch 1"
        else:
            advice = f"lower --max-batch-size to {self.largest_batch}, or lower --max-seq-len"
        several = f"{self.tensor_parallel} x " * (self.tensor_parallel > 1)
        return BuildError(f"does not fit on {several}{self.gpu}, per GPU: {self.arithmetic()}; {advice}")


def gib(count: float) -> str:
    return f"{count / GIB:.2f}"
