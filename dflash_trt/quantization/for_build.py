"""A pair in the precision of a build. Checkpoints that are not quantized yet are quantized on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.bundle.workspace import Progress
from dflash_trt.checkpoint.layouts import is_integer
from dflash_trt.checkpoint.linears import number_formats, shape_of, stored_linear
from dflash_trt.checkpoint.pair import CheckpointPair
from dflash_trt.checkpoint.rules import Quantization
from dflash_trt.checkpoint.tensors import SINGLE, Checkpoint, Outline
from dflash_trt.checkpoint.writer import Entry, write_checkpoint
from dflash_trt.errors import UsageError
from dflash_trt.files.reading import read_config
from dflash_trt.formats import FORMATS, Algorithm
from dflash_trt.formats.base import BLOCK, WeightLayout
from dflash_trt.formats.integers import PER_CHANNEL
from dflash_trt.formats.precision import Precision
from dflash_trt.quantization import repack
from dflash_trt.quantization.convert import STEP_BYTES, quantize, quantize_head
from dflash_trt.quantization.layers import HEAD, QuantizationRecipe, head_weight

Weights = Checkpoint | Outline


def in_precision(
    pair: CheckpointPair, precision: Precision, folder: Path, progress: Progress, layout: WeightLayout
) -> CheckpointPair:
    """The pair with its checkpoints in this precision, and the head that the drafter has to itself, if any.

    New checkpoints are written to `folder`.

    Scales come from the weights alone; calibrated ones are made before, by `quantize --calibration`. `layout`: how the
    engine reads quantized weights. An engine of blocks multiplies the head in them too: the target's gets its scheme.
    With `draft_tokens` the drafter's own head has their rows only, and the target's head is not quantized.

    Raises BuildError where a checkpoint is quantized already, otherwise than asked.
    """
    work = _Work(folder, progress, layout)
    checkpoints: dict[str, Weights] = {role: side.checkpoint for role, side in pair.sides.items()}
    schemes = {role: scheme for role in checkpoints if (scheme := precision.scheme(role)) is not None}
    for role in schemes:
        checkpoints[role] = work.without_blocks(role, checkpoints[role])
    target, scheme = checkpoints["target"], precision.scheme("head")
    if pair.draft_tokens is not None and isinstance(target, Checkpoint):
        checkpoints["head"] = work.draft_head(target, np.asarray(pair.draft_tokens, np.int64))
    if scheme is not None:
        checkpoints["head"] = work.head(checkpoints.get("head", target), scheme)
    for role, asked in schemes.items():
        checkpoints[role] = work.quantized(role, checkpoints[role], asked)
    for role, checkpoint in checkpoints.items():
        checkpoints[role] = work.laid_out(role, checkpoint)
    return replace(
        pair,
        target=replace(pair.target, checkpoint=checkpoints["target"]),
        drafter=pair.drafter and replace(pair.drafter, checkpoint=checkpoints["drafter"]),
        head=checkpoints.get("head"),
    )


class _Work:
    """Checkpoints made in `folder`, for an engine that reads weights in `layout`."""

    def __init__(self, folder: Path, progress: Progress, layout: WeightLayout) -> None:
        self.folder, self.progress, self.layout = folder, progress, layout

    @cached_property
    def per_channel(self) -> bool:
        """Whether INT8 has one scale for each output: where this processor multiplies such layers faster."""
        if self.layout != "blocks":
            return False
        from dflash_trt.engines.onnxruntime.products import channels_pay

        return channels_pay()

    def recipe(self, scheme: str) -> QuantizationRecipe:
        """Blocks have a scale of their own each: larger groups would spare nothing."""
        return QuantizationRecipe(scheme, BLOCK if self.layout == "blocks" else None, self.per_channel)

    def without_blocks(self, role: str, checkpoint: Weights) -> Weights:
        """The checkpoint in BF16 where all its layers are in FP8 by blocks, which may be quantized again."""
        algorithms = checkpoint.quantization.algorithms
        if not algorithms or any(algorithm.group_rows == 1 for algorithm in algorithms):
            return checkpoint
        if isinstance(checkpoint, Outline):
            return Outline(checkpoint.directory, Quantization(checkpoint.quantization.path))
        return repack.in_bf16(checkpoint, self.folder / f"{role}-bf16", self.progress)

    def draft_head(self, target: Checkpoint, tokens: NDArray[np.int64]) -> Checkpoint:
        """The head's rows of `tokens`, and `d2t`, each token's id minus its row.

        Raises BuildError if the target has no LM head.
        """
        tensors = {"weight": head_weight(target)}
        if (algorithm := target.quantization.algorithm(HEAD)) is not None:  # every tensor is by row there
            rows, columns = shape_of(target, algorithm, HEAD, tensors["weight"])
            stored = stored_linear(target, HEAD, columns, rows)
            assert stored is not None
            tensors = {info.name.rpartition(".")[2]: info for info in stored.tensors}

        def some(name: str, end: str) -> Iterator[tuple[str, NDArray[Any]]]:
            head = target.array(name)
            step = max(1, STEP_BYTES // head[0].nbytes)
            for at in range(0, len(tokens), step):
                yield f"{HEAD}.{end}", head[tokens[at : at + step]]

        entries = [
            *(
                Entry(f"{HEAD}.{end}", info.dtype, (len(tokens), *info.shape[1:]), some(info.name, end))
                for end, info in tensors.items()
            ),
            Entry("d2t", "I64", (len(tokens),), [("d2t", tokens - np.arange(len(tokens)))]),
        ]
        config = read_config(target.directory / "config.json") | {"tie_word_embeddings": False}
        out = self.folder / "draft-head"
        out.mkdir()
        write_checkpoint(target.directory, out, [(SINGLE, entries)], config)
        return Checkpoint(out)

    def head(self, target: Weights, scheme: str) -> Weights:
        """The head in a scheme, as a checkpoint of its own."""
        if isinstance(target, Outline):
            return self._outline(target, scheme, {})
        if target.quantization.algorithm(HEAD) is not None and f"{HEAD}.weight_scale" in target.tensors:
            raise UsageError(
                f"--precision is head={scheme}, but {target.directory} already has a quantized LM head: leave head out"
            )
        recipe = self.recipe(scheme)
        return Checkpoint(quantize_head(target.directory, self.folder / "head", recipe, self.progress))

    def quantized(self, role: str, checkpoint: Weights, scheme: str) -> Weights:
        stored = sorted({algorithm.scheme for algorithm in checkpoint.quantization.algorithms})
        if stored and stored != [scheme]:
            raise UsageError(
                f"--precision is {role}={scheme}, but {checkpoint.directory} is already {', '.join(stored)}; give "
                f"the unquantized checkpoint, or leave {role} out"
            )
        if stored:
            return checkpoint
        in_blocks = self.layout == "blocks" and FORMATS[scheme].integer_bits is not None
        head = scheme if in_blocks and role == "target" else None
        if isinstance(checkpoint, Outline):
            return self._outline(checkpoint, scheme, {HEAD: None} if head is None else {})
        out, recipe = self.folder / role, self.recipe(scheme)
        return Checkpoint(quantize(checkpoint.directory, out, recipe, head=head, progress=self.progress))

    def laid_out(self, role: str, checkpoint: Weights) -> Weights:
        """The checkpoint with its weights as the engine reads them."""
        out = self.folder / f"{role}-{self.layout}"
        if isinstance(checkpoint, Outline):
            return _in_blocks(checkpoint, self.per_channel) if self.layout == "blocks" else checkpoint
        if self.layout == "int4_by_row":
            return repack.int4_by_row(checkpoint, out, self.progress)
        if self.layout != "blocks":
            return checkpoint
        from dflash_trt.engines.onnxruntime.products import fewest_rows

        integers = any(FORMATS[scheme].integer_bits is not None for scheme in number_formats(checkpoint))
        # What a drafter drafts changes no token.
        eight_bits = integers and role == "target" and fewest_rows(4) is None
        channels = integers and self.per_channel
        return repack.in_blocks(checkpoint, out, self.progress, eight_bits=eight_bits, channels=channels)

    def _outline(self, checkpoint: Outline, scheme: str, layers: Mapping[str, Algorithm | None]) -> Outline:
        """A checkpoint without weights in a scheme, but for `layers`. The widths of its layers are not known here."""
        algorithm = self.recipe(scheme).algorithm(FORMATS[scheme].group_sizes[-1:])
        return Outline(
            checkpoint.directory, Quantization(checkpoint.directory / "config.json", algorithm, layers)
        )


def _in_blocks(checkpoint: Outline, channels: bool) -> Outline:
    """As `repack.in_blocks`: layers of integers in blocks, and all others in floating point."""
    quantization = checkpoint.quantization

    def kept(algorithm: Algorithm | None) -> Algorithm | None:
        return algorithm if algorithm is not None and is_integer(algorithm) else None

    integers = replace(
        quantization,
        default=kept(quantization.default),
        layers={name: kept(algorithm) for name, algorithm in quantization.layers.items()},
        rules=tuple(replace(rule, algorithm=kept(rule.algorithm)) for rule in quantization.rules),
    )
    in_rows = channels and integers.algorithms <= {PER_CHANNEL}
    return Outline(checkpoint.directory, integers, in_blocks=not in_rows)
