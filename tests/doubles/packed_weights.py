"""Random weights in fewer bits for our kernels, and their numbers."""

from __future__ import annotations

import torch
from dflash_plugins import launch, layers
from dflash_plugins import packed as products
from torch import Tensor

from dflash_trt.engines.torch import packed


def rows_product(x: Tensor, weight: products.PackedWeight, logits: Tensor, run: launch.Run) -> Tensor:
    """x [rows,in] by a weight, or each row by that of a stack whose logit [rows,experts] is the largest."""
    if not weight.form.experts:
        return products.product(x, weight, None, run)
    _, _, order, groups = layers.route(logits, 1, run)
    return products.experts_product(x, weight, order, groups, run)


def random_weight(
    form: products.Packing, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> tuple[products.PackedWeight, Tensor]:
    """A weight of this form, or a stack, and its numbers in float32 by torch's operators on the host. dtype: of numbers
    without a format.
    """
    generator, stack = torch.Generator().manual_seed(0), [form.experts] if form.experts else []
    if form.codes == "plain":
        numbers = torch.randn(*stack, form.outputs, form.inputs, generator=generator).to(device, dtype)
        return products.plain(numbers), numbers.float()
    columns = 2 * form.inputs // form.in_word, -(-form.inputs // (form.group or form.inputs))
    shape = *stack, -(-form.outputs // (form.group_rows or form.outputs)), columns[1]
    codes = torch.randint(0, 256, (*stack, form.outputs, columns[0]), generator=generator, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0  # NaN in E4M3
    stored = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}.get(form.codes, torch.uint8)
    scales = torch.rand(shape, generator=generator) / 100
    if form.scales == "e8m0":
        scales = torch.randint(115, 122, shape, generator=generator).to(torch.uint8)
    elif form.scales == "e4m3":
        scales = (scales * 10_000).to(torch.float8_e4m3fn)
    else:
        scales = scales.to(launch.TYPES[form.scales])
    second = 437.5 + torch.arange(max(form.experts, 1))
    second = second if form.second == "over" else 1 / second
    zeros = torch.randn(*stack, form.outputs, columns[1], generator=generator) / 100
    a = {"codes": form.codes, "columns": form.inputs, "group_size": form.group, "group_rows": form.group_rows}
    a |= {"reciprocal": form.second == "over", "to": 1}
    parts = [codes.view(stored), scales, second if form.second else None, zeros if form.zeros else None]
    there = [None if part is None else part.to(device) for part in parts]
    return packed.stored(a, *there), packed.weight(a, *parts)
