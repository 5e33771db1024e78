"""The layers of a checkpoint that are quantized, and the numbers that they get."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from dflash_trt.checkpoint.tensors import Checkpoint, TensorInfo, role_of
from dflash_trt.errors import BuildError, UsageError
from dflash_trt.formats import FORMATS, Algorithm, NumberFormat
from dflash_trt.formats.base import FLOAT_DTYPES
from dflash_trt.formats.integers import PER_CHANNEL

HEAD = "lm_head"
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
_QUANTIZED_ROLES = ("attention", "mlp", "experts", "fc")
# Layers that engines multiply as one share their scales, as in Model Optimizer.
_EXPERT = re.compile(r"((?:.*\.)?experts)\.\d+\.(.*)")  # the layer, and the expert's linear layer
_FUSED = ((re.compile(r"\.[qkv]_proj$"), ".qkv_proj"), (re.compile(r"\.(gate|up)_proj$"), ".gate_up_proj"))
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A layer to quantize, with its weight as stored."""

    name: str
    source: TensorInfo
    algorithm: Algorithm

    @property
    def format(self) -> NumberFormat:
        return FORMATS[self.algorithm.scheme]


@dataclass(frozen=True, slots=True)
class QuantizationRecipe:
    """How layers are quantized: to the numbers of `scheme`, the name of a number format.

    largest_group: the most weights that share a scale, where the scheme leaves a choice.
    per_channel: INT8 layers, experts apart, have one scale for each output.
    """

    scheme: str
    largest_group: int | None = None
    per_channel: bool = False

    def algorithm(self, inputs: Sequence[int], *, expert: bool = False) -> Algorithm:
        if self.per_channel and self.scheme == PER_CHANNEL.scheme and not expert:
            return PER_CHANNEL
        groups = [] if self.largest_group is None else [self.largest_group]
        return FORMATS[self.scheme].algorithm(inputs=[*inputs, *groups])

    def layers(self, weights: Mapping[str, TensorInfo]) -> dict[str, LinearLayer]:
        """The layers with these weights. Raises BuildError, naming a layer, where the scheme does not fit."""
        inputs = [weight.shape[1] for weight in weights.values()]
        layers = {}
        for name, weight in weights.items():
            algorithm = self.algorithm(inputs, expert=of_all_experts(name) != name)
            layers[name] = LinearLayer(name, weight, algorithm)
            rows, columns = weight.shape
            group, even = algorithm.group_size or 1, layers[name].format.even_rows
            if columns % group or (even and rows % 2):
                raise BuildError(
                    f"{weight.file}: {name} is [{rows}, {columns}], but {self.scheme} needs inputs in groups of {group}"
                    f"{' and an even number of outputs' * even}; leave it as it is with --exclude {name!r}"
                )
        return layers


def linear_layers(checkpoint: Checkpoint, exclude: Sequence[str] = ()) -> dict[str, TensorInfo]:
    """The weights to quantize, by layer.

    Raises BuildError for a pattern of `exclude` that matches no layer, or only some of a layer's experts.
    """
    weights = {
        tensor.name.removesuffix(".weight"): tensor
        for tensor in checkpoint.tensors.values()
        if tensor.name.endswith(".weight")
        and len(tensor.shape) == 2
        and tensor.dtype in FLOAT_DTYPES
        and role_of(tensor.name) in _QUANTIZED_ROLES
    }
    left: set[str] = set()
    for pattern in exclude:
        matching = {name for name in weights if fnmatchcase(name, pattern)}
        if not matching:
            raise UsageError(
                f"--exclude {pattern!r} matches no linear layer; one is named {next(iter(weights), 'none')}"
            )
        left |= matching
    if halved := set(map(of_all_experts, left)) & set(map(of_all_experts, weights.keys() - left)):
        raise UsageError(
            f"--exclude matches some of {min(halved)}, but not all; the experts of a layer must be stored alike"
        )
    return {name: tensor for name, tensor in weights.items() if name not in left}


def head_weight(checkpoint: Checkpoint) -> TensorInfo:
    """The weight of the LM head, which may be the embedding. Raises BuildError if there is none."""
    for name in (f"{HEAD}.weight", *_EMBEDDINGS):
        if name in checkpoint.tensors:
            return checkpoint.tensors[name]
    raise BuildError(
        f"{checkpoint.directory}: has no LM head; a drafter uses its target's head: quantize the target's"
    )


def of_all_experts(name: str) -> str:
    """An expert's linear layer as a pattern for all experts of its layer. Any other name is returned unchanged."""
    return _EXPERT.sub(r"\1.*.\2", name)


def multiplied_as_one(items: Iterable[Item], layer: Callable[[Item], str]) -> dict[str, list[Item]]:
    """Items in order, those together whose layers engines multiply as one, by a name for all of these.

    `layer`: the name of an item's layer. A drafter's queries come before keys and values.
    """
    groups: dict[str, list[Item]] = {}
    for item in items:
        name = layer(item)
        for pattern, whole in _FUSED:
            name = pattern.sub(whole, name)
        groups.setdefault(name, []).append(item)
    return {
        name: sorted(group, key=lambda item: ".q_proj" not in layer(item)) for name, group in groups.items()
    }
