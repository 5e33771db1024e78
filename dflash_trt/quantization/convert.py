"""Quantize the linear layers of a checkpoint, in the format of NVIDIA's Model Optimizer.

Only the weights are read, and their scales come from their own magnitudes. Scales of activations are computed in each
pass; those of a calibration are Model Optimizer's (modelopt.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.bundle.workspace import Progress, silent, workspace
from dflash_trt.checkpoint.gguf import rounded_to
from dflash_trt.checkpoint.quantization import QUANT_CONFIG
from dflash_trt.checkpoint.tensors import Checkpoint, TensorInfo
from dflash_trt.checkpoint.writer import Entry, write_checkpoint
from dflash_trt.errors import BuildError, CheckpointError, UsageError
from dflash_trt.files.disk import write_object
from dflash_trt.files.reading import read_config
from dflash_trt.formats import INT4, SCHEMES, Algorithm
from dflash_trt.logs import warn_once
from dflash_trt.quantization.layers import (
    HEAD,
    LinearLayer,
    QuantizationRecipe,
    head_weight,
    linear_layers,
    multiplied_as_one,
    of_all_experts,
)
from dflash_trt.version import __version__

# Bytes of float32 that one step widens.
STEP_BYTES = 32 << 20


def quantize(
    source: Path,
    out: Path,
    scheme: str | QuantizationRecipe,
    *,
    exclude: Sequence[str] = (),
    head: str | None = None,
    progress: Progress = silent,
) -> Path:
    """Write the checkpoint in `source` to `out` with its linear layers in `scheme`; returns `out`.

    `scheme` is fp8, nvfp4, mxfp4, int8 or int4, or a recipe. Embedding, norms, routers and gpt-oss's experts (in MXFP4)
    stay as they are, and so do layers that a pattern of `exclude` matches, such as `model.layers.0.*`. The LM head
    stays, too, unless `head` names a scheme for it.

    Works shard by shard beside `out`, which appears when all is whole. Holds one step of a tensor in memory, 32 MiB in
    float32.

    Raises:
        CheckpointError: the source is quantized already, or has a weight that is not finite.
        BuildError: the scheme does not fit a layer, or `out` exists.
    """
    recipe = scheme if isinstance(scheme, QuantizationRecipe) else QuantizationRecipe(scheme)
    for option, value in (("scheme", recipe.scheme), ("head", head or recipe.scheme)):
        if value not in SCHEMES:
            raise UsageError(f"--{option} is {value!r}, expected one of: {', '.join(SCHEMES)}")
    checkpoint = Checkpoint(source)
    if (stored := checkpoint.quantization).name is not None:
        raise CheckpointError(
            f"{stored.path}: the checkpoint is already {stored.name}; quantize the original checkpoint"
        )
    if kinds := rounded_to(source):
        warn_once(
            logging.getLogger(__name__),
            f"{source}: was {kinds} in its GGUF file, and {recipe.scheme} rounds it again, which loses more; a build "
            "for ONNX Runtime keeps the file's numbers where --precision leaves target out",
        )
    layers = recipe.layers(linear_layers(checkpoint, exclude))
    if head is not None:
        of_head = replace(recipe, scheme=head)
        layers |= of_head.layers({HEAD: head_weight(checkpoint)})
    if not layers:
        raise BuildError(f"{source}: has no linear layer to quantize")
    copied = [t for t in checkpoint.tensors.values() if t.name.removesuffix(".weight") not in layers]
    return _convert(checkpoint, out, layers, copied, progress)


def quantize_head(source: Path, out: Path, recipe: QuantizationRecipe, progress: Progress) -> Path:
    """Write only the LM head of the target in `source`, quantized, with its draft vocabulary if it has one."""
    checkpoint = Checkpoint(source)
    layers = recipe.layers({HEAD: head_weight(checkpoint)})
    table = [tensor for tensor in checkpoint.tensors.values() if tensor.name == "d2t"]
    return _convert(checkpoint, out, layers, table, progress)


def _convert(
    checkpoint: Checkpoint,
    out: Path,
    layers: Mapping[str, LinearLayer],
    copied: Sequence[TensorInfo],
    progress: Progress,
) -> Path:
    config = _quant_config(layers, copied)
    with workspace(out) as place:
        place.check_free()
        work = place.path
        shards = _Shards(checkpoint, layers, copied, progress)
        write_checkpoint(
            checkpoint.directory,
            work,
            ((file.name, shards.entries(file)) for file in checkpoint.files),
            _config(checkpoint.directory, config, untied=HEAD in layers),
        )
        progress("quantize", shards.total, shards.total)
        write_object(work / QUANT_CONFIG, config)
        place.publish()
    return out


class _Shards:
    """The tensors of each shard: copied ones, and those of quantized layers.

    Layers that are multiplied as one share the scale of their whole weights, and lie one behind the other.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layers: Mapping[str, LinearLayer],
        copied: Sequence[TensorInfo],
        progress: Progress,
    ) -> None:
        self.checkpoint, self.copied, self.progress = checkpoint, copied, progress
        sources = [*copied, *(layer.source for layer in layers.values())]
        self.total, self.done = sum(tensor.nbytes for tensor in sources), 0
        self.groups = multiplied_as_one(layers.values(), lambda layer: layer.name)
        self._largest: dict[str, float] = {}

    def entries(self, file: Path) -> list[Entry]:
        """What becomes of the tensors in `file`."""
        entries = [
            replace(entry, pieces=self._counted(entry, tensor))
            for tensor in self.copied
            if tensor.file == file
            for entry in [as_it_is(self.checkpoint, tensor)]
        ]
        for group, members in self.groups.items():
            for layer in members:
                if layer.source.file == file:
                    entries += self._quantized(layer, group)
        return entries

    def _counted(self, entry: Entry, source: TensorInfo) -> Iterator[tuple[str, NDArray[Any]]]:
        yield from entry.pieces
        self.progress("quantize", self.done, self.total)
        self.done += source.nbytes

    def _quantized(self, layer: LinearLayer, group: str) -> list[Entry]:
        """The layer's tensors. The first yields the data of all."""
        written = layer.format.written(layer.algorithm, *layer.source.shape)
        shared = [suffix for suffix, (_, shape) in written.items() if not shape]  # the scale of whole weights
        entries = [Entry(f"{layer.name}.{suffix}", *form) for suffix, form in written.items()]
        pieces = self._encoded(layer, group, shared)
        first = replace(entries[0], pieces=pieces)
        return [replace(first, pieces=self._counted(first, layer.source)), *entries[1:]]

    def _encoded(
        self, layer: LinearLayer, group: str, shared: Sequence[str]
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        """Pieces of the layer's tensors, by name. The pieces of each tensor are in order."""
        name, form, scale = layer.name, layer.format, np.ones((), np.float32)
        for suffix in shared:
            scale = form.scale_of(self._largest_of(group))
            yield f"{name}.{suffix}", scale
        for rows in self._rows(layer):
            for suffix, piece in form.encode(layer.algorithm, rows, scale).items():
                yield f"{name}.{suffix}", piece

    def _rows(self, layer: LinearLayer) -> Iterator[NDArray[np.float32]]:
        """The weight in float32, in pieces with an even number of rows, except for the last."""
        array = self.checkpoint.array(layer.source.name)
        step = max(2, STEP_BYTES // (4 * layer.source.shape[1]) // 2 * 2)
        for begin in range(0, len(array), step):
            rows = array[begin : begin + step].astype(np.float32)
            if not np.isfinite(rows).all():
                raise CheckpointError(
                    f"{layer.source.file}: tensor {layer.source.name!r} has numbers that are not finite; it cannot be "
                    f"quantized: fetch it again, or leave it as it is with --exclude {layer.name!r}"
                )
            yield rows

    def _largest_of(self, group: str) -> float:
        """The largest magnitude of all layers of a group."""
        if group not in self._largest:
            rows = (rows for layer in self.groups[group] for rows in self._rows(layer))
            self._largest[group] = max(float(np.abs(some).max(initial=0)) for some in rows)
        return self._largest[group]


def as_it_is(checkpoint: Checkpoint, info: TensorInfo) -> Entry:
    flat = checkpoint.array(info.name).reshape(-1).view(np.uint8)
    places = range(0, len(flat), STEP_BYTES)
    pieces = ((info.name, flat[at : at + STEP_BYTES]) for at in places)
    return Entry(info.name, info.dtype, info.shape, pieces)


def _quant_config(layers: Mapping[str, LinearLayer], copied: Sequence[TensorInfo]) -> dict[str, Any]:

    def fields(algorithm: Algorithm) -> dict[str, Any]:
        grouped = {"group_size": algorithm.group_size} if algorithm.group_size else {}
        weights_only = (
            {"has_zero_point": False, "pre_quant_scale": False} if algorithm.scheme == INT4.name else {}
        )
        return {"quant_algo": algorithm.name, **grouped, **weights_only}

    linear = {
        t.name.removesuffix(".weight") for t in copied if len(t.shape) == 2 and t.name.endswith(".weight")
    }
    left = {of_all_experts(name) for name in linear | {HEAD} if name not in layers and "embed" not in name}
    algorithms = {layer.algorithm for layer in layers.values()}
    section: dict[str, Any] = {"kv_cache_quant_algo": None, "exclude_modules": sorted(left)}
    if len(algorithms) == 1:
        section |= fields(algorithms.pop())
    else:
        by_layer = {name: fields(layers[name].algorithm) for name in sorted(layers)}
        section |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": by_layer}
    producer = {"name": "dflash-trt", "version": __version__}
    return {"producer": producer, "quantization": section}


def _config(source: Path, quantization: Mapping[str, Any], *, untied: bool) -> dict[str, Any]:
    config = read_config(source / "config.json")
    if not config.get("quantization_config"):  # gpt-oss's config describes its experts here
        section = dict(quantization["quantization"])
        section["ignore"] = section.pop("exclude_modules")
        section.pop("kv_cache_quant_algo")
        config["quantization_config"] = {"quant_method": "modelopt", **section}
    if untied and config.get("tie_word_embeddings"):
        config["tie_word_embeddings"] = False
    return config
