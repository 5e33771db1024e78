"""Registers, spilled bytes, shared memory and instructions of the products of layers, compiled here for GPUs.

python -m build_scripts.registers 80 89 90 100 120        needs no GPU
"""

from __future__ import annotations

import re
import sys

import triton
from dflash_plugins import packed
from dflash_plugins.compiler import compile_kernel

from dflash_trt.errors import BuildError

FORMS = (
    packed.Packing(4096, 4096, "plain"),
    packed.Packing(4096, 4096, "e4m3", "bf16", group=128, group_rows=128),
    packed.Packing(4096, 4096, "int4", "bf16", group=128),
)


def main() -> None:
    """One line for each target, form, tile and number of tokens."""
    print(f"Triton {triton.__version__}: target, codes, tile, tokens: shared, registers, spilled, products")
    for target in map(int, sys.argv[1:]):
        for form in FORMS:
            for tile in form.tiles[:-1]:
                for tokens in tile.tokens:
                    print(
                        target,
                        form.codes,
                        tile,
                        f"{tokens}:",
                        *compiled(form, tile, tokens, target),
                        flush=True,
                    )


def compiled(form: packed.Packing, tile: packed.Tile, tokens: int, target: int) -> tuple[object, ...]:
    """What a product takes, or why it cannot be compiled."""
    try:
        kernel = compile_kernel(packed.product_use(form, "bf16", tokens, tile, biased=False), target)
    except BuildError as error:
        return (error,)
    products = set(re.findall(r"wgmma\.mma_async\S+|tcgen05\.mma\S+|mma\.sync\S+", kernel.ptx))
    return kernel.shared_bytes, kernel.registers, kernel.spill_bytes, *sorted(products)


if __name__ == "__main__":
    main()
