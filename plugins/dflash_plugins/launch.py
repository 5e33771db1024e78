"""Launch kernels on contiguous torch tensors, here those between the passes of a round; layers.py has those of layers.

`run` says how: `compiled.Kernels` launches what was compiled before, and needs no Triton. `by_triton` compiles, or
interprets on CPU tensors; set TRITON_INTERPRET=1 before anything imports triton. Launches go to torch's current stream.
They allocate their outputs unless these are given.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_plugins import kernel_specs as uses
from dflash_plugins.kernel_table import ACCEPT_BLOCK, SAMPLE_SELECT, SAMPLE_TILES, Kernel
from dflash_trt.decoding.params import SamplingParams

TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()} | {"i32": torch.int32, "i64": torch.int64}

# Called with a kernel's use, its grid, and its arguments by name. Those that a kernel goes without are None.
Run = Callable[..., None]


def by_triton(use: uses.Use, grid: tuple[int, ...], **arguments: Any) -> None:
    """A launch for which Triton compiles the kernel, or interprets it."""
    module = importlib.import_module(f"dflash_plugins.kernels.{use.module}")
    present = {name: value for name, value in arguments.items() if value is not None}
    getattr(module, use.function)[grid](**present, **use.launch)


def call(
    run: Run,
    kernel: Kernel,
    *inputs: Tensor | None,
    tile: Any = None,
    memory: Mapping[str, Tensor] | None = None,
    **attributes: Any,
) -> dict[str, Tensor]:
    """Launch a kernel of kernel_table.py on its inputs, in their order, and return its outputs by name.

    tile: the first one by default. memory: outputs that are written there. Raises BuildError for more than the kernel
    takes.
    """
    named = dict(zip(kernel.inputs, inputs, strict=False))
    s, a = kernel.sizes([None if x is None else x.shape for x in inputs]), kernel.given(attributes)
    kernel.check(s)
    like, tile = named.get(kernel.like), tile or kernel.tiles(s)[0]
    dtype = "" if like is None else TYPE_NAMES[like.dtype]
    outputs = empty_outputs(
        kernel, s, a, dtype, next(x.device for x in inputs if x is not None), memory or {}
    )
    integers = kernel.integers(s, a)
    run(kernel.use(s, a, dtype, tile), kernel.grid(s, a, tile), **named, **integers, **outputs)
    return outputs


def empty_outputs(
    kernel: Kernel,
    s: Any,
    a: Any,
    dtype: str,
    device: torch.device | str,
    memory: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The outputs of a kernel for these sizes and attributes: those in `memory`, and new ones."""
    return {
        name: memory[name]
        if name in memory
        else torch.empty(shape, dtype=TYPES[kind or dtype], device=device)
        for name, (shape, kind) in kernel.outputs(s, a).items()
    }


# The sampling parameters of a request: the kernels take one tensor each, with an entry for each request.
SAMPLING = {"temperature": torch.float32, "reach": torch.float32, "top_k": torch.int32}
SAMPLING |= {"top_p": torch.float32, "seed": torch.int64}


def sampling_numbers(params: Sequence[SamplingParams], seeds: Sequence[int]) -> dict[str, list[float]]:
    """The parameters of requests, as in `SAMPLING`. `reach` is -log(min_p), and `seed` has the bits of an unsigned
    number. Penalties are not included: apply them to the logits first.
    """
    return {
        "temperature": [p.temperature for p in params],
        "reach": [-math.log(p.min_p) if p.min_p > 0 else math.inf for p in params],
        "top_k": [p.top_k for p in params],
        "top_p": [p.top_p for p in params],
        "seed": [seed - (seed >> 63 << 64) for seed in seeds],
    }


def sampling_tensors(
    params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device | str
) -> dict[str, Tensor]:
    """The parameters of requests as new tensors."""
    numbers = sampling_numbers(params, seeds)
    return {name: torch.tensor(values, dtype=SAMPLING[name]).to(device) for name, values in numbers.items()}


def sample_rows(
    logits: Tensor,
    params: Mapping[str, Tensor],
    positions: Tensor,
    *,
    memory: Mapping[str, Tensor] | None = None,
    run: Run = by_triton,
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B, R] and their log-probabilities float32 [B, R] from float32 logits [B, R, V].

    positions: int64 [B, R], the position of the token that each row predicts. A row with a NaN or infinite logit, or
    without a finite one, gets the token -1 and a NaN. memory: of `sampling_memory`; the results are its own then, with
    room for more rows.
    """
    heat, reach, top_k, top_p, seed = (params[name] for name in SAMPLING)
    partial = call(run, SAMPLE_TILES, logits, heat, top_p, seed, positions, memory=memory)
    inputs = logits, heat, reach, top_k, top_p, seed, positions, *partial.values()
    chosen = call(run, SAMPLE_SELECT, *inputs, memory=memory)
    return chosen["sampled"], chosen["logprob"]


def sampling_memory(rows: int, vocab: int, device: torch.device | str) -> dict[str, Tensor]:
    """What `sample_rows` writes for so many rows of logits: its results and its scratch memory."""
    s = SAMPLE_TILES.sizes([(rows, 1, vocab)])
    kernels = SAMPLE_TILES, SAMPLE_SELECT
    return {n: t for kernel in kernels for n, t in empty_outputs(kernel, s, None, "", device, {}).items()}


def adjust_rows(
    logits: Tensor,
    tokens: Tensor,
    start: Tensor,
    positions: Tensor,
    visible: Tensor,
    *,
    memory: Mapping[str, Tensor],
    most: int,
    run: Run = by_triton,
) -> None:
    """Adjust the rows of requests by their tokens so far, in place: float32 logits [B, N, V], N up to `most`.

    tokens: int64 [B, N], anchors with drafts. start: int64 [B], the anchors' positions. positions: as of `sample_rows`.
    visible: bool, whether a row's node comes after another one: [B, N, N] of trees, or [M, M] of any chains.
    memory: what is known of the requests, by slot (engines/device/adjusting.py).
    """
    vocab, nodes = logits.shape[2], logits.shape[1]
    shared = {
        "logits": logits,
        "tokens": tokens,
        "nodes": nodes,
        "counts": memory["counts"],
        "facts": memory["facts"],
    }
    texts = {name: memory[name] for name in ("words", "texts")} | {"room": memory["texts"].shape[1]}
    use = uses.read_texts(vocab, most)
    run(use, (len(logits),), **shared, **texts, start=start, position=positions)
    use = uses.adjust_rows(vocab, most)
    steps = {"between": visible.stride(0) if visible.dim() == 3 else 0, "across": visible.stride(-2)}
    shared |= {name: memory[name] for name in ("factors", "bias")}
    grid = uses.ceil_div(vocab, use.constants["STEP"]), len(logits)
    run(use, grid, **shared, **steps, visible=visible.view(torch.uint8))


@dataclass(frozen=True)
class Accepted:
    """The result of a round: int64 tensors."""

    accepted: Tensor  # [B]
    next_token: Tensor  # [B], -1 if the deciding row had no finite largest logit


def accept_block(
    tokens: Tensor, rows: Tensor, sampled: Tensor, *, results: Accepted | None = None, run: Run = by_triton
) -> Accepted:
    """Compare drafted with sampled tokens: contiguous int64 tokens [B, S], rows [B, R], sampled [B, R].

    results: get the result.
    """
    memory = None if results is None else {"accepted": results.accepted, "next_token": results.next_token}
    return Accepted(**call(run, ACCEPT_BLOCK, tokens, rows, sampled, memory=memory))


class Compaction:
    """Moves rows of caches, given as contiguous tensors [slots, heads, capacity, size] that stay where they are: up to
    `most` at a time.
    """

    def __init__(self, caches: Sequence[Tensor], most: int, run: Run = by_triton) -> None:
        sizes = [rows.shape[3] * rows.element_size() for rows in caches]
        if wrong := [size for size in sizes if size % 4]:
            raise ValueError(f"a row has {wrong[0]} bytes, expected a multiple of 4")
        if not all(rows.is_contiguous() for rows in caches):
            raise ValueError("a cache is not contiguous")
        device = caches[0].device
        self._use, self._run = uses.compact_rows(most), run
        self._caches = caches  # held: the kernel knows their addresses only
        self._most_heads = max(rows.shape[1] for rows in caches)
        self._table = {
            "caches": torch.tensor([rows.data_ptr() for rows in caches], dtype=torch.int64, device=device),
            "heads": torch.tensor([rows.shape[1] for rows in caches], dtype=torch.int32, device=device),
            "words": torch.tensor([size // 4 for size in sizes], dtype=torch.int32, device=device),
        }

    def __call__(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Rows start + nodes[i] of a slot become rows start + i, in every cache. `nodes` rise."""
        order = (*nodes, *[0] * (len(self._use.types["nodes"]) - len(nodes)))
        capacity = self._caches[0].shape[2]
        places = {"nodes": order, "slot": slot, "start": start, "count": len(nodes), "capacity": capacity}
        self._run(self._use, (len(self._caches), self._most_heads), **self._table, **places)


def fill_tokens(
    block: Tensor,
    drafts: Tensor,
    *,
    drafted: int,
    tokens: Tensor,
    rows: Tensor,
    most: int,
    run: Run | None = by_triton,
) -> None:
    """The target's input: the anchors of `block`, then the best drafts. From column `drafted` on, 1 to N, the column
    before it is repeated. Without `run`, torch's operators do it.

    block, tokens, rows: int64 [B, N], N up to `most`. `rows` becomes 0 .. N-1. drafts: int64 [B, N-1, W], best first.
    """
    if run is None:
        torch.cat((block[:, :1], drafts[:, :, 0]), dim=1, out=tokens)
        tokens[:, drafted:] = tokens[:, drafted - 1 : drafted]
        rows.copy_(torch.arange(rows.shape[1], device=rows.device).expand(rows.shape))
        return
    sizes = {"nodes": block.shape[1], "drafted": drafted, "width": drafts.shape[2]}
    run(uses.fill_tokens(most), (len(block),), block=block, drafts=drafts, **sizes, tokens=tokens, rows=rows)


def end_round(
    logits: Tensor,
    features: Tensor,
    places: Tensor | None,
    *,
    finite: Tensor,
    unread: Tensor,
    counters: Tensor,
    run: Run | None = by_triton,
) -> None:
    """Whether each row of logits has a finite largest number, and the features of such rows for the drafter. Without
    `run`, torch's operators do it.

    logits: float32 [B, N, V]. A NaN is the largest number. finite: int32 [B, N].
    features: [B, N, F]. Those of node i become row places[b] + i of unread [slots, room, F], if there is such a row.
    places: int64 [B]. None copies no features.
    counters: int32 [B * N or more], zeros. The kernel leaves zeros there.
    """
    batch, nodes, vocab = logits.shape
    if run is not None:
        use = uses.end_round(
            vocab, features.shape[2], TYPE_NAMES[features.dtype], committing=places is not None
        )
        tensors = {"logits": logits, "features": features, "places": places, "finite": finite}
        tensors |= {"unread": unread, "counters": counters}
        run(use, (batch * nodes, use.constants["TILES"]), **tensors, nodes=nodes, room=unread.shape[1])
        return
    sound = torch.isfinite(logits.amax(dim=-1))
    finite.copy_(sound)
    if places is None:
        return
    mine = unread[:batch]
    node = torch.arange(mine.shape[1], device=mine.device) - places[:, None]
    inside = (node >= 0) & (node < nodes)
    node = node.clamp(0, nodes - 1)
    taken = (inside & sound.gather(1, node))[:, :, None]
    rows = features.gather(1, node[:, :, None].expand(mine.shape))
    mine.copy_(torch.where(taken, rows, mine))
