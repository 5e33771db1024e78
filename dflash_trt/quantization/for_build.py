"""A pair in the precision of a build. Checkpoints that are not quantized yet are quantized on the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from dflash_trt.bundle.workspace import Progress
from dflash_trt.checkpoint.linears import number_formats
from dflash_trt.checkpoint.rules import Quantization
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.errors import UsageError
from dflash_trt.files.disk import stamp, whole_file
from dflash_trt.formats import FORMATS, Algorithm
from dflash_trt.formats.base import BLOCK, WeightLayout
from dflash_trt.formats.int8 import PER_CHANNEL
from dflash_trt.formats.precision import Precision
from dflash_trt.quantization import repack
from dflash_trt.quantization.convert import HEAD, data_free, quantize, quantize_head
from dflash_trt.quantization.draft_head import draft_head
from dflash_trt.quantization.widen import in_bf16

Weights = Checkpoint | Outline


def in_precision(
    target: Weights,
    drafter: Weights,
    precision: Precision,
    folder: Path,
    progress: Progress,
    *,
    layout: WeightLayout = "stored",
    draft_tokens: Sequence[int] | None = None,
) -> tuple[Weights, Weights, Weights | None]:
    """Target, drafter, and the head that the drafter has to itself, if any.

    New checkpoints are written to `folder`. Those that an interrupted build made there of the same input are reused.

    Scales come from the weights alone; calibrated ones are made before, by `dflash-trt quantize`. `layout`: how the
    engine reads quantized weights. An engine of blocks multiplies the head in them too: the target's gets its scheme.
    `draft_tokens`: the drafter's own head has the rows of these tokens only. The target's head is not quantized then.

    Raises BuildError where a checkpoint is quantized already, otherwise than asked.
    """
    found = {"target": target, "drafter": drafter}
    for role, checkpoint in found.items():
        if precision.scheme(role) is not None:
            found[role] = _without_blocks(checkpoint, folder / f"{role}-bf16", progress)
    target = found["target"]
    head: Weights | None = None
    if draft_tokens is not None and isinstance(target, Checkpoint):
        place = _place(folder / "draft-head", target, json.dumps(list(draft_tokens)))
        head = Checkpoint(draft_head(target, draft_tokens, place))
    if (scheme := precision.scheme("head")) is not None:
        head = _head(head or target, scheme, folder / "head", layout, progress)
    for role, checkpoint in found.items():
        if (scheme := precision.scheme(role)) is None:
            continue
        with_head = role == "target" and _with_blocks(layout, scheme)
        if checkpoint.quantization.algorithms:
            stored = sorted({a.scheme for a in checkpoint.quantization.algorithms})
            if stored != [scheme]:
                raise UsageError(
                    f"--precision is {role}={scheme}, but {checkpoint.directory} is already {', '.join(stored)}; give "
                    f"the unquantized checkpoint, or leave {role} out"
                )
        elif isinstance(checkpoint, Checkpoint):
            out = _place(folder / role, checkpoint, _recipe(scheme, layout))
            found[role] = Checkpoint(
                quantize(
                    checkpoint.directory,
                    out,
                    scheme,
                    head=scheme if with_head else None,
                    largest_group=_largest_group(layout),
                    per_channel=_per_channel(layout),
                    progress=progress,
                )
            )
        else:
            found[role] = _outline(checkpoint, scheme, layout, {} if with_head else {HEAD: None})
    made = found | ({} if head is None else {"head": head})
    for role, checkpoint in made.items():
        if isinstance(checkpoint, Checkpoint):
            made[role] = _laid_out(checkpoint, layout, folder, role, progress)
    return made["target"], made["drafter"], made.get("head")


def _without_blocks(checkpoint: Weights, folder: Path, progress: Progress) -> Weights:
    """The checkpoint in BF16 where all its layers are in FP8 by blocks, which may be quantized again."""
    algorithms = checkpoint.quantization.algorithms
    if not algorithms or any(algorithm.group_rows == 1 for algorithm in algorithms):
        return checkpoint
    if not isinstance(checkpoint, Checkpoint):
        return Outline(checkpoint.directory, Quantization(checkpoint.quantization.path))
    return Checkpoint(in_bf16(checkpoint, _place(folder, checkpoint, "bf16"), progress))


def _laid_out(
    checkpoint: Checkpoint, layout: WeightLayout, folder: Path, role: str, progress: Progress
) -> Checkpoint:
    """The checkpoint with its weights as the engine reads them."""
    out = folder / f"{role}-{layout}"
    if layout == "int4_by_row" and repack.has_signed(checkpoint):
        return Checkpoint(repack.int4_by_row(checkpoint, _place(out, checkpoint, layout), progress))
    if layout == "blocks":
        from dflash_trt.engines.onnxruntime_products import fewest_rows

        integers = any(FORMATS[scheme].integer_bits is not None for scheme in number_formats(checkpoint))
        # What a drafter drafts changes no token.
        eight_bits = integers and role == "target" and fewest_rows(4) is None
        channels = integers and _per_channel(layout)
        if not repack.has_blocks(checkpoint, eight_bits=eight_bits, channels=channels):
            return checkpoint
        out = _place(out, checkpoint, f"{layout} of {8 if eight_bits else 4} bits{', by output' * channels}")
        return Checkpoint(
            repack.in_blocks(checkpoint, out, progress, eight_bits=eight_bits, channels=channels)
        )
    return checkpoint


def _outline(
    checkpoint: Outline, scheme: str, layout: WeightLayout, layers: Mapping[str, Algorithm | None]
) -> Outline:
    """A checkpoint without weights in a scheme, but for `layers`. The widths of its layers are not known here."""
    algorithm = data_free(scheme, inputs=FORMATS[scheme].group_sizes[-1:])
    channels = _per_channel(layout) and scheme == PER_CHANNEL.scheme
    path = checkpoint.directory / "config.json"
    quantization = Quantization(path, PER_CHANNEL if channels else algorithm, layers)
    return Outline(checkpoint.directory, quantization, in_blocks=layout == "blocks" and not channels)


def _largest_group(layout: WeightLayout) -> int | None:
    """Blocks have a scale of their own each: larger groups would spare nothing."""
    return BLOCK if layout == "blocks" else None


def _per_channel(layout: WeightLayout) -> bool:
    """Whether INT8 has one scale for each output: where this processor multiplies such layers faster than blocks."""
    if layout != "blocks":
        return False
    from dflash_trt.engines.onnxruntime_products import channels_pay

    return channels_pay()


def _recipe(scheme: str, layout: WeightLayout) -> str:
    return f"{scheme}{', by output' * _per_channel(layout)}"


def _with_blocks(layout: WeightLayout, scheme: str) -> bool:
    return layout == "blocks" and FORMATS[scheme].integer_bits is not None


def _head(target: Weights, scheme: str, folder: Path, layout: WeightLayout, progress: Progress) -> Weights:
    if not isinstance(target, Checkpoint):
        return _outline(target, scheme, layout, {})
    if target.quantization.algorithm(HEAD) is not None and f"{HEAD}.weight_scale" in target.tensors:
        raise UsageError(
            f"--precision is head={scheme}, but {target.directory} already has a quantized LM head: leave head out"
        )
    return Checkpoint(
        quantize_head(
            target.directory,
            _place(folder, target, _recipe(scheme, layout)),
            scheme,
            largest_group=_largest_group(layout),
            per_channel=_per_channel(layout),
            progress=progress,
        )
    )


def _place(folder: Path, source: Checkpoint, made: str) -> Path:
    """`folder`, for a checkpoint made from `source`. Anything that another source left there is removed."""
    files = [source.directory / "config.json", *source.files]
    inputs = json.dumps([made, [stamp(file.stat()) for file in files]]).encode()
    note = folder.with_name(f"{folder.name}.inputs")
    if not note.is_file() or note.read_bytes() != inputs:
        note.unlink(missing_ok=True)  # first: what a kill leaves of the folder belongs to no inputs
        shutil.rmtree(folder, ignore_errors=True)
        with whole_file(note) as file:
            file.write(inputs)
    return folder
