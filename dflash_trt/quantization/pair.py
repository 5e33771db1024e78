"""A pair in the precision that a build was asked for: quantized on the way where its checkpoints are not yet."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.checkpoint.linears import number_formats
from dflash_trt.checkpoint.quantization import Quantization
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.errors import BuildError
from dflash_trt.formats import FORMATS, INT4
from dflash_trt.precision import Precision
from dflash_trt.workspace import Progress

from .convert import HEAD, data_free, quantize, quantize_head, repack_int4

Weights = Checkpoint | Outline


def in_precision(
    target: Weights,
    drafter: Weights,
    precision: Precision,
    folder: Path,
    progress: Progress,
    *,
    int4_by_row: bool = False,
) -> tuple[Weights, Weights, Weights | None]:
    """Target, drafter, and the head that the drafter has to itself, if any; what is made lies in `folder`.

    Scales come from the weights alone; calibrated ones are made before, by `dflash-trt quantize`. `int4_by_row`: for an
    engine that reads INT4 with two columns in a byte, as ONNX has it.

    Raises BuildError where a checkpoint is quantized already, otherwise than asked.
    """
    found = {"target": target, "drafter": drafter}
    head: Weights | None = None
    if (scheme := precision.scheme("head")) is not None:
        head = _head(target, scheme, folder / "head", progress)
    for role, checkpoint in found.items():
        if (scheme := precision.scheme(role)) is None:
            continue
        if checkpoint.quantization.algorithms:
            stored = sorted({a.scheme for a in checkpoint.quantization.algorithms})
            if stored != [scheme]:
                raise BuildError(
                    f"--precision is {role}={scheme}, but {checkpoint.directory} is {', '.join(stored)} already; "
                    f"give the checkpoint it was made from, or leave {role} out"
                )
        elif isinstance(checkpoint, Checkpoint):
            found[role] = Checkpoint(
                quantize(checkpoint.directory, folder / role, scheme, replace_other=True, progress=progress)
            )
        else:
            # The layers' widths are not known here.
            algorithm = data_free(scheme, inputs=FORMATS[scheme].group_sizes[-1:])
            path = checkpoint.directory / "config.json"
            found[role] = Outline(
                checkpoint.directory, Quantization(path, algorithm, excluded=frozenset({HEAD}))
            )
    if int4_by_row:
        for role, checkpoint in found.items():
            if isinstance(checkpoint, Checkpoint) and INT4.name in number_formats(checkpoint):
                found[role] = Checkpoint(repack_int4(checkpoint, folder / f"{role}-by-row", progress))
        if isinstance(head, Checkpoint) and INT4.name in number_formats(head):
            head = Checkpoint(repack_int4(head, folder / "head-by-row", progress))
    return found["target"], found["drafter"], head


def _head(target: Weights, scheme: str, folder: Path, progress: Progress) -> Weights:
    if not isinstance(target, Checkpoint):
        path = target.directory / "config.json"
        return Outline(target.directory, Quantization(path, data_free(scheme)))
    if target.quantization.algorithm(HEAD) is not None and f"{HEAD}.weight_scale" in target.tensors:
        raise BuildError(
            f"--precision is head={scheme}, but {target.directory} has a quantized LM head already: leave head out"
        )
    return Checkpoint(quantize_head(target.directory, folder, scheme, progress))
