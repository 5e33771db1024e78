"""The kernels that passes launch, at sizes of published models, compiled without a GPU, and what each takes.

python -m tests.doubles.launched_kernels TARGETS [every]       as lines of JSON, for targets such as 80,90

Runs in its own process: kernels are compiled here, but interpreted in the process of the tests.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import triton
from dflash_plugins import compiler, packed
from dflash_plugins import kernel_specs as uses
from dflash_plugins.compiled import Compiled
from dflash_plugins.kernel_specs import Use
from dflash_plugins.kernel_table import KERNELS

from dflash_trt.engines.device.kernels import unfit
from dflash_trt.errors import BuildError
from tests.doubles.plugin_targets import CASES
from tests.plugins.test_packed import FORMS, STACKS

PROMPTS = packed.ROWS[-1]


@dataclass(frozen=True)
class Launched:
    """The first of these uses that a launch can hold, and the bytes that it may spill. timed: whether each of them is
    launched that a launch can hold. once: whether it is compiled for all GPUs at once.
    """

    uses: Sequence[Use]
    spills: int = 0
    timed: bool = False
    once: bool = False


_WRITTEN = "q", "cos", "sin", "start", "k_cache", "v_cache"
_NORMED = "q_norm", "k_norm", *_WRITTEN
# Heads of Qwen3-8B, with all that they may have, and of gpt-oss-20b; and the inputs of their products.
HEADS = {
    uses.place_heads(32, 8, 8, 128, 64, 1e-6, "bf16", present=(*_NORMED, "region"), fp8=True): 4096,
    uses.place_heads(64, 8, 8, 64, 32, 1e-5, "bf16", present=(*_WRITTEN, "region")): 2880,
}


def between_products() -> Iterator[Use]:
    """Norms, routers, gates, heads and the best tokens."""
    yield uses.router(32, 2880, "bf16", biased=True, epsilon=1e-5, k=4, arranged=True)
    yield uses.router(256, 7168, "bf16", biased=False, epsilon=1e-6, k=8)
    yield uses.router(128, 2048, "bf16", biased=False)
    yield from (uses.router(experts, 2880, "bf16", biased=True, epsilon=1e-5) for experts in (32, 128))
    yield uses.add_norm(2880, 1e-5, "bf16", parts=8)
    yield from (uses.add_norm(hidden, 1e-6, "bf16") for hidden in (576, 4096, 8192))
    yield uses.gate(12_288, "bf16")
    for rounding in (("fp8", True), ("nvfp4", False)):
        yield from (uses.gate(inner, "bf16", rounding) for inner in (12_288, 28_672))
        yield from (uses.add_norm(8192, 1e-6, "bf16", rounding), uses.quantized_rows(8192, "bf16", rounding))
    yield from HEADS
    yield uses.place_heads(32, 8, 8, 128, 64, 1e-6, "bf16", present=_NORMED)
    yield uses.place_heads(0, 4, 4, 256, 32, 1e-6, "fp32", present=("k_norm", *_WRITTEN[1:]))
    yield from (uses.best_token(vocab, "bf16") for vocab in (3000, 50_257, 201_088))
    yield from (uses.best_token(151_936, "fp32"), uses.best_token(50))
    yield uses.merge(32, 128, "bf16", sinks=False, by_row=True)
    yield from (uses.merge(64, head, "bf16", sinks=True) for head in (128, 256, 512))


def attention() -> Iterator[Launched]:
    """Of a round and of a prompt: over regions, windows, caches in FP8 and trees."""
    for head, kind in itertools.product((64, 128, 256, 512), range(4)):
        if kind in (1, 3) and head > 128:
            continue
        tiles = uses.attention_tiles(head)
        for order in (tiles[1:3] + tiles[:1] + tiles[3:], tiles[3:] + tiles[2::-1]):
            options: dict[str, Any] = {"tree": kind == 3, "region": kind < 3}
            options |= {"windowed": kind == 1, "fp8": kind == 2}
            yield Launched([uses.attend(8, 8, head, "bf16", tile, **options) for tile in order], 72)


def products() -> Iterator[Launched]:
    """Of layers and of experts, of few rows and of many."""
    plain = packed.Packing(2304, 4096, "plain"), packed.Packing(768, 2048, "plain", experts=128)
    for form, (dtype, tokens) in itertools.product(plain, (("bf16", PROMPTS), ("fp16", packed.ROWS[0]))):
        yield Launched([packed.product_use(form, dtype, tokens, tile, biased=False) for tile in form.tiles])
    for (heads, inputs), tokens in itertools.product(HEADS.items(), (packed.ROWS[0], PROMPTS)):
        form = packed.Packing(
            sum(heads.constants[n] for n in ("H", "KEYS", "VALUES")) * heads.constants["D"], inputs, "plain"
        )
        tiles = [tile for tile in form.tiles if not heads.constants["D"] % tile.block_n]
        yield Launched([packed.heads_use(form, "bf16", tokens, tile, heads, biased=True) for tile in tiles])
    forms = [replace(form, outputs=2304, inputs=4096) for form in FORMS if form.codes != "plain"]
    forms += [
        replace(form, outputs=768, inputs=2048, experts=128) for form in STACKS if form.codes != "plain"
    ]
    for form in forms:
        # In prompts, experts' products spill more.
        many, scaled = 96 if form.experts else 48, form.codes in ("e4m3", "e2m1")
        yield Launched(
            [
                packed.product_use(form, "bf16", PROMPTS, tile, biased=False, scaled=scaled)
                for tile in form.tiles
            ],
            many,
        )
        yield Launched(
            [packed.product_use(form, "fp16", 16, tile, biased=not form.experts) for tile in form.tiles], 24
        )
        if not form.experts:
            yield from (
                Launched([packed.widen_use(form, dtype, form.tiles[0])]) for dtype in ("bf16", "fp16")
            )


def of_plans() -> Iterator[Launched]:
    """What a plan of TensorRT holds, of which it times the tiles."""
    by_name = {kernel.name: kernel for kernel in KERNELS}
    for name, (shapes, attributes) in CASES.items():
        kernel = by_name[name.split()[0]]
        s, a = kernel.sizes(shapes), kernel.given(attributes)
        yield Launched([kernel.use(s, a, "bf16", tile) for tile in kernel.tiles(s)], timed=True)


def launched(*, every: bool) -> list[Launched]:
    """All of them, the newest kernels first; or one of each function, and of experts' products those of E2M1."""
    found = [*map(Launched, ([use] for use in between_products())), *attention(), *products(), *of_plans()]
    # ptxas spills 8 bytes of adjust_rows on sm_89.
    found += [Launched([use], 8, once=True) for use in uses.round_uses(201_088, 14_400, "bf16", 16)]
    return found if every else list({_kind(each.uses[0]): each for each in reversed(found)}.values())


def _kind(use: Use) -> tuple[Any, ...]:
    """One of each kind is compiled by all tests."""
    return use.function, use.constants.get("CODES"), "groups" in use.types


def compiled(wanted: Launched, target: int) -> Iterator[tuple[Use, Compiled]]:
    """The kernels of a GPU. Those between passes are compiled once, and assembled for each."""
    for use in wanted.uses:
        kernel = compiler.compile_kernel(use, uses.ROUND_TARGET if wanted.once else target)
        if wanted.once:
            registers, spills = compiler.resources(kernel.ptx, target)
            kernel = replace(kernel, registers=registers, spill_bytes=spills)
        fits = unfit(use, kernel) is None
        if fits or use is wanted.uses[-1]:
            yield use, kernel
        if fits and not wanted.timed:
            return


def problem(wanted: Launched, use: Use, kernel: Compiled, target: int) -> str:
    """What is wrong with a kernel, or nothing."""
    if (reason := unfit(use, kernel)) is not None:
        return reason
    if kernel.spill_bytes > wanted.spills:
        return f"it spills {kernel.spill_bytes} bytes, {wanted.spills} are allowed"
    if {*kernel.parameters} != {*use.types}:
        return f"its parameters are {kernel.parameters}"
    if use.function == "router" and target >= 90:
        compiler.resources(kernel.waiting, target)  # or its instruction is refused
    if use.function == "widen" and not use.constants["EXACT"] and re.search(r"mul\.(rn\.)?b?f16", kernel.ptx):
        return "it multiplies in 16 bits"
    if wanted.once and ".target sm_80" not in kernel.ptx:
        return "it is not compiled for the oldest GPU"
    atomic = {"end_round": 1}.get(use.function, 0)  # one addition ends a row of logits
    if wanted.once and use.function != "read_texts" and kernel.ptx.count("atom.") != atomic:
        return "it has other atomic operations"
    return ""


def main() -> None:
    targets, every = [*map(int, sys.argv[1].split(","))], len(sys.argv) > 2
    for wanted, target in itertools.product(launched(every=every), targets):
        row: dict[str, Any] = {"triton": triton.__version__, "sm": target}
        try:
            for use, kernel in compiled(wanted, target):
                found = problem(wanted, use, kernel, target)
                row |= {"kernel": use.function, "registers": kernel.registers, "spills": kernel.spill_bytes}
                row |= {"shared": kernel.shared_bytes, "problem": found, "use": str(use)}
                print(json.dumps(row), flush=True)
        except BuildError as error:
            use = wanted.uses[0]
            print(
                json.dumps(row | {"kernel": use.function, "problem": str(error), "use": str(use)}), flush=True
            )


if __name__ == "__main__":
    main()
