"""How the driver gets kernels, without a GPU: those that start while the one before them ends, and those that ask for
more shared memory or spill registers.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
from dflash_plugins import compiled, packed
from dflash_plugins.kernel_specs import attend, attention_tiles, gate

from dflash_trt.engines.device import kernels
from dflash_trt.errors import BuildError

PTX = ".version 8.7\n.target sm_90a\n.visible .entry add(\n\t.param .u32 add_param_0\n)\n.reqntid 64\n{\n\tret;\n}\n"
KERNEL = compiled.Compiled("add", PTX, 64, 1024, 8, 0, ("count",))


class Library:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.images, self.launches = list[str](), list[tuple[Any, ...]]()
        self.asked = list[tuple[int, ...]]()

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:
        self.images.append(image.decode())
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 5
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.asked.append((function.value, attribute, value))
        return 0

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        self.launches.append(("plain", [size.value for size in rest[:7]], rest[7].value))
        return 0

    def cuLaunchKernelEx(self, launch: Any, function: Any, pointers: Any, extra: Any) -> int:
        """Reads the structures as cuda.h declares them."""
        raw = ctypes.string_at(launch, 56)
        sizes = list((ctypes.c_uint * 7).from_buffer_copy(raw))
        stream, attributes = (ctypes.c_uint64 * 2).from_buffer_copy(raw, 32)
        assert ctypes.c_uint.from_buffer_copy(raw, 48).value == 1
        given = ctypes.string_at(attributes, 72)
        identifier, allowed = (ctypes.c_int.from_buffer_copy(given, at).value for at in (0, 8))
        count = ctypes.c_int.from_address(pointers[0]).value
        self.launches.append((identifier, allowed, sizes, stream, function.value, count, extra))
        return 0


@pytest.mark.parametrize(
    ("on", "target", "waits"), [(False, 90, 0), (True, 90, 1), (True, 120, 1), (True, 80, 0)]
)
def test_a_kernel_waits_for_those_before_it(
    on: bool, target: int, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it may start before they end, which GPUs can from 9.0 on."""
    library, kernel = Library(), replace(KERNEL, ptx=PTX.replace("sm_90a", f"sm_{target}"))
    monkeypatch.setattr(compiled.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(compiled, "OVERLAP", on)
    driver = compiled.CudaDriver()
    driver.launch(driver.load(kernel), kernel, (3, 2), [ctypes.c_int32(9)], 11)
    wait = "{\ngriddepcontrol.wait;\ngriddepcontrol.launch_dependents;\n\tret;"
    assert library.images[0].count(wait) == library.images[0].count("griddep") / 2 == waits
    sizes = [3, 2, 1, 64, 1, 1, 1024]
    assert library.launches == [(6, 1, sizes, 11, 5, 9, None) if waits else ("plain", sizes, 11)]


def test_products_ask_for_the_shared_memory_that_every_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of TensorRT cannot, and the tiles of other kernels were chosen within what needs no question."""
    library = Library()
    monkeypatch.setattr(compiled.ctypes, "CDLL", lambda name: library)
    for size, asked in ((48 << 10, []), (49_168, [(5, 8, 49_168)])):
        compiled.CudaDriver().load(replace(KERNEL, shared_bytes=size))
        assert library.asked == asked
    product = packed.product_use(
        packed.Packing(64, 64, "plain"), "bf16", 64, packed.TILES[1][0], biased=False
    )
    monkeypatch.setattr(kernels, "target", lambda: 100)
    ptx, size = PTX + "st.global", 49_168
    monkeypatch.setattr(
        kernels.compiler, "compile_kernel", lambda *_: replace(KERNEL, ptx=ptx, shared_bytes=size)
    )
    assert kernels.compile_here(product).shared_bytes == size
    with pytest.raises(BuildError, match="49168 bytes of shared memory"):
        kernels.compile_here(gate(64, "bf16"))
    size = (96 << 10) + 1
    with pytest.raises(BuildError, match="98305 bytes"):
        kernels.compile_here(product)


def test_a_tile_that_spills_is_left_to_a_smaller_one() -> None:
    """But for the smallest, so that a kernel of ours is left."""
    form = packed.Packing(256, 256, "int4", "bf16", group=32)
    products = [packed.product_use(form, "bf16", 64, tile, biased=False) for tile in form.tiles[:2]]
    few, many = (attend(1, 1, 128, "bf16", tile, tree=False) for tile in attention_tiles(128)[:2])
    spilled = replace(KERNEL, ptx=PTX + "st.global", spill_bytes=112)
    for large, small in (products, (many, few)):
        assert "spills 112 bytes" in str(kernels.unfit(large, spilled))
        assert kernels.unfit(small, spilled) is None
        assert kernels.unfit(large, replace(spilled, spill_bytes=24)) is None
