"""Quantize the linear layers of a checkpoint, in the format of NVIDIA's Model Optimizer.

Only the weights are read, and their scales come from their own magnitudes. Scales of activations are computed in each
pass, unless a calibration provides the largest magnitudes (calibrate.py).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.bundle.manifest import digest
from dflash_trt.bundle.workspace import Progress, silent, workspace
from dflash_trt.checkpoint.mapped import released
from dflash_trt.checkpoint.quantization import QUANT_CONFIG
from dflash_trt.checkpoint.roles import role_of
from dflash_trt.checkpoint.tensors import INDEX, Checkpoint, TensorInfo
from dflash_trt.checkpoint.writer import Entry, write_shard
from dflash_trt.errors import BuildError, CheckpointError, UsageError
from dflash_trt.files.disk import own_file, whole_file
from dflash_trt.files.reading import read_object
from dflash_trt.formats import FORMATS, INT4, SCHEMES, Algorithm
from dflash_trt.formats.base import FLOAT_DTYPES
from dflash_trt.formats.int8 import PER_CHANNEL

HEAD = "lm_head"
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
_QUANTIZED_ROLES = ("attention", "mlp", "experts", "fc")
_COPIED = (".json", ".jinja", ".txt", ".model")
# Bytes of float32 that one step widens.
STEP_BYTES = 32 << 20
# Layers that engines multiply as one share their scales, as in Model Optimizer.
_EXPERT = re.compile(r"((?:.*\.)?experts)\.\d+\.(.*)")  # the layer, and the expert's linear layer
_FUSED = ((re.compile(r"\.[qkv]_proj$"), ".qkv_proj"), (re.compile(r"\.(gate|up)_proj$"), ".gate_up_proj"))


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    source: TensorInfo
    algorithm: Algorithm


def quantize(
    source: Path,
    out: Path,
    scheme: str,
    *,
    exclude: Sequence[str] = (),
    head: str | None = None,
    largest_group: int | None = None,
    per_channel: bool = False,
    calibration: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the checkpoint in `source` to `out` with its linear layers in `scheme`; returns `out`.

    `scheme` is fp8, nvfp4, mxfp4, int8 or int4. Embedding, norms, routers and gpt-oss's experts (in MXFP4) stay as
    they are, and so do layers that a pattern of `exclude` matches, such as `model.layers.0.*`. The LM head
    stays, too, unless `head` names a scheme for it. At most `largest_group` weights share a scale, where the scheme
    leaves a choice. `per_channel`: int8 layers, experts apart, have one scale for each output. `calibration`: layer ->
    largest magnitude of its input; fp8 and nvfp4 then get static input scales.

    Works shard by shard beside `out`, which appears when all is whole; an interrupted run continues where it was. Holds
    one step of a tensor in memory, 32 MiB in float32.

    Raises:
        CheckpointError: the source is quantized already, or has a weight that is not finite.
        BuildError: the scheme does not fit a layer, or `out` holds something else.
    """
    checkpoint = Checkpoint(source)
    layers = _layers(
        checkpoint,
        scheme,
        exclude,
        head,
        largest_group=largest_group,
        per_channel=per_channel,
        calibrated=calibration is not None,
    )
    copied = [t for t in checkpoint.tensors.values() if t.name.removesuffix(".weight") not in layers]
    if calibration is not None and (missing := sorted(set(layers) - set(calibration) - {HEAD})):
        raise BuildError(
            f"{source}: the calibration has no value for {len(missing)} layers, such as {missing[0]}"
        )
    return _convert(checkpoint, out, layers, copied, calibration or {}, progress or silent)


def quantize_head(
    source: Path,
    out: Path,
    scheme: str,
    *,
    largest_group: int | None = None,
    per_channel: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write only the LM head of the target in `source`, quantized."""
    checkpoint = Checkpoint(source)
    layers = {HEAD: _head(checkpoint, scheme, largest_group, per_channel=per_channel)}
    _check_groups(layers)
    table = [
        tensor for tensor in checkpoint.tensors.values() if tensor.name == "d2t"
    ]  # of a draft vocabulary
    return _convert(checkpoint, out, layers, table, {}, progress or silent)


def data_free(scheme: str, *, calibrated: bool = False, inputs: Sequence[int] = ()) -> Algorithm:
    """The algorithm of a scheme, for layers with these numbers of inputs."""
    return FORMATS[scheme].algorithm(calibrated=calibrated, inputs=inputs)


def linear_layers(checkpoint: Checkpoint, exclude: Sequence[str] = ()) -> dict[str, TensorInfo]:
    """The weights to quantize, by layer.

    Raises BuildError for a pattern of `exclude` that matches no layer, or only some of a layer's experts.
    """
    named = {
        tensor.name.removesuffix(".weight"): tensor
        for tensor in checkpoint.tensors.values()
        if tensor.name.endswith(".weight")
        and len(tensor.shape) == 2
        and tensor.dtype in FLOAT_DTYPES
        and role_of(tensor.name) in _QUANTIZED_ROLES
    }
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise UsageError(
                f"--exclude {pattern!r} matches no linear layer; one is named {next(iter(named), 'none')}"
            )
    kept = {n: t for n, t in named.items() if not any(fnmatchcase(n, pattern) for pattern in exclude)}
    halved = {of_all_experts(name) for name in kept} & {of_all_experts(n) for n in named if n not in kept}
    if halved:
        raise UsageError(
            f"--exclude matches some of {min(halved)}, but not all; the experts of a layer must be stored alike"
        )
    return kept


def of_all_experts(name: str) -> str:
    """An expert's linear layer as a pattern for all experts of its layer. Any other name is returned unchanged."""
    return _EXPERT.sub(r"\1.*.\2", name)


def _layers(
    checkpoint: Checkpoint,
    scheme: str,
    exclude: Sequence[str],
    head: str | None,
    *,
    largest_group: int | None,
    per_channel: bool,
    calibrated: bool,
) -> dict[str, _Layer]:
    for option, value in (("scheme", scheme), ("head", head or scheme)):
        if value not in SCHEMES:
            raise UsageError(f"--{option} is {value!r}, expected one of: {', '.join(SCHEMES)}")
    found = checkpoint.quantization
    if found.name is not None:
        raise CheckpointError(
            f"{found.path}: the checkpoint is already {found.name}; quantize the original checkpoint"
        )
    kept = linear_layers(checkpoint, exclude)
    inputs = _dividing([t.shape[1] for t in kept.values()], largest_group)
    algorithm = data_free(scheme, calibrated=calibrated, inputs=inputs)
    channels = PER_CHANNEL if per_channel and scheme == PER_CHANNEL.scheme else algorithm
    layers = {
        name: _Layer(name, tensor, algorithm if of_all_experts(name) != name else channels)
        for name, tensor in kept.items()
    }
    if head is not None:
        layers[HEAD] = _head(checkpoint, head, largest_group, per_channel=per_channel)
    if not layers:
        raise BuildError(f"{checkpoint.directory}: has no linear layer to quantize")
    _check_groups(layers)
    return layers


def _head(checkpoint: Checkpoint, scheme: str, largest_group: int | None, *, per_channel: bool) -> _Layer:
    """The head as a layer. It is not calibrated: every row brings its own input scale."""
    weight = head_weight(checkpoint)
    if per_channel and scheme == PER_CHANNEL.scheme:
        return _Layer(HEAD, weight, PER_CHANNEL)
    return _Layer(HEAD, weight, data_free(scheme, inputs=_dividing([weight.shape[1]], largest_group)))


def head_weight(checkpoint: Checkpoint) -> TensorInfo:
    """The weight of the LM head, which may be the embedding. Raises BuildError if there is none."""
    places = (checkpoint.tensors.get(name) for name in (f"{HEAD}.weight", *_EMBEDDINGS))
    weight = next((tensor for tensor in places if tensor is not None), None)
    if weight is None:
        raise BuildError(
            f"{checkpoint.directory}: has no LM head; a drafter uses its target's head: quantize the target's"
        )
    return weight


def _dividing(inputs: Sequence[int], largest_group: int | None) -> list[int]:
    """Numbers that a group divides where it divides all `inputs` and is not larger than `largest_group`."""
    return [*inputs, *([] if largest_group is None else [largest_group])]


def _check_groups(layers: Mapping[str, _Layer]) -> None:
    for layer in layers.values():
        rows, columns = layer.source.shape
        group, even = layer.algorithm.group_size or 1, FORMATS[layer.algorithm.scheme].even_rows
        if columns % group or (even and rows % 2):
            raise BuildError(
                f"{layer.source.file}: {layer.name} is [{rows}, {columns}], but {layer.algorithm.scheme} needs inputs "
                f"in groups of {group}{' and an even number of outputs' * even}; "
                f"leave it as it is with --exclude {layer.name!r}"
            )


def _convert(
    checkpoint: Checkpoint,
    out: Path,
    layers: Mapping[str, _Layer],
    copied: Sequence[TensorInfo],
    amax: Mapping[str, float],
    progress: Progress,
) -> Path:
    config = _quant_config(checkpoint, layers, copied)
    config["producer"]["inputs"] = _key(checkpoint, config, amax, copied)
    with workspace(out) as place, released(checkpoint.files):
        if _made_as(out / QUANT_CONFIG, config):
            place.done = True
            whole = Checkpoint(out)
            whole.check_digests({file.name: digest(file) for file in whole.files})
            return out
        place.check_free("exists and is not this checkpoint quantized this way")
        work = place.path
        begun = work / QUANT_CONFIG
        if not _made_as(begun, config):
            place.empty()
            write_json(begun, config)
        total = sum(t.nbytes for t in copied) + sum(layer.source.nbytes for layer in layers.values())
        state = _State(checkpoint, layers, amax, progress, total)
        weight_map: dict[str, str] = {}
        for file in checkpoint.files:
            entries = [
                *(Entry(t.name, t.dtype, t.shape, state.copy(t)) for t in copied if t.file == file),
                *(e for la in _side_by_side(layers) if la.source.file == file for e in state.entries(la)),
            ]
            weight_map |= {entry.name: file.name for entry in entries}
            if entries and not (work / file.name).is_file():
                write_shard(work / file.name, entries)
        if set(weight_map.values()) != {"model.safetensors"}:
            size = sum(path.stat().st_size for path in work.glob("*.safetensors"))
            write_json(work / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        copy_files(checkpoint.directory, work)
        _write_config(checkpoint.directory, work, config, untied=HEAD in layers)
        progress("quantize", total, total)
        digests = {path.name: digest(path) for path in sorted(work.glob("*.safetensors"))}
        write_json(begun, config | {"producer": config["producer"] | {"sha256": digests}})
        place.publish()
    return out


class _State:
    """State shared by all shards while they are written: scales of fused layers, and progress."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layers: Mapping[str, _Layer],
        amax: Mapping[str, float],
        progress: Progress,
        total: int,
    ) -> None:
        self.checkpoint, self.progress, self.total, self.done = checkpoint, progress, total, 0
        self.groups: dict[str, list[_Layer]] = {}
        for layer in layers.values():
            self.groups.setdefault(joined_name(layer.name), []).append(layer)
        self.amax = {
            group: max((amax[member.name] for member in members if member.name in amax), default=None)
            for group, members in self.groups.items()
        }
        self._largest: dict[str, float] = {}

    def _advance(self, nbytes: int) -> None:
        self.progress("quantize", self.done, self.total)
        self.done += nbytes

    def copy(self, info: TensorInfo) -> Iterator[tuple[str, NDArray[Any]]]:
        flat = self.checkpoint.array(info.name).reshape(-1).view(np.uint8)
        for begin in range(0, len(flat), STEP_BYTES):
            yield info.name, flat[begin : begin + STEP_BYTES]
        self._advance(info.nbytes)

    def rows(self, layer: _Layer) -> Iterator[NDArray[np.float32]]:
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

    def largest(self, layer: _Layer) -> float:
        """The largest magnitude of all layers that are multiplied as one with this layer."""
        group = joined_name(layer.name)
        if group not in self._largest:
            members = self.groups[group]
            self._largest[group] = max(float(np.abs(r).max(initial=0)) for m in members for r in self.rows(m))
        return self._largest[group]

    def entries(self, layer: _Layer) -> list[Entry]:
        """The tensors of the quantized layer. The first yields the data of all tensors that are written row by row."""
        name, algorithm = layer.name, layer.algorithm
        written = FORMATS[algorithm.scheme].written(algorithm, *layer.source.shape)
        entries = [Entry(f"{name}.{suffix}", *form) for suffix, form in written.items()]
        entries[0] = replace(entries[0], pieces=self._encoded(layer))
        if algorithm.activations and self.amax[joined_name(name)] is not None:
            entries.append(Entry(f"{name}.input_scale", "F32", ()))
        return entries

    def _encoded(self, layer: _Layer) -> Iterator[tuple[str, NDArray[Any]]]:
        """Pieces of the layer's tensors, by name. The pieces of each tensor are in order."""
        name, algorithm = layer.name, layer.algorithm
        form, seen = FORMATS[algorithm.scheme], self.amax[joined_name(name)]
        if algorithm.activations and seen is not None:
            yield f"{name}.input_scale", form.scale_of(seen)
        shared: NDArray[np.float32] = np.ones((), np.float32)
        if (suffix := form.shared_scale(algorithm)) is not None:
            shared = form.scale_of(self.largest(layer))
            yield f"{name}.{suffix}", shared
        for rows in self.rows(layer):
            for suffix, piece in form.encode(algorithm, rows, shared).items():
                yield f"{name}.{suffix}", piece
        self._advance(layer.source.nbytes)


def joined_name(layer: str) -> str:
    """A name that layers have in common which engines multiply as one."""
    name = layer
    for pattern, whole in _FUSED:
        name = pattern.sub(whole, name)
    return name


def _side_by_side(layers: Mapping[str, _Layer]) -> list[_Layer]:
    """Layers in file order. Layers that are multiplied as one are adjacent, with a drafter's queries before keys and
    values.
    """
    groups: dict[str, list[_Layer]] = {}
    for layer in layers.values():
        groups.setdefault(joined_name(layer.name), []).append(layer)
    queries_first = (
        sorted(group, key=lambda layer: ".q_proj" not in layer.name) for group in groups.values()
    )
    return [layer for group in queries_first for layer in group]


def _quant_config(
    checkpoint: Checkpoint, layers: Mapping[str, _Layer], copied: Sequence[TensorInfo]
) -> dict[str, Any]:
    """The content of hf_quant_config.json."""

    def of(algorithm: Algorithm) -> dict[str, Any]:
        found: dict[str, Any] = {"quant_algo": algorithm.name}
        if algorithm.group_size:
            found["group_size"] = algorithm.group_size
        if algorithm.scheme == INT4.name:
            found |= {"has_zero_point": False, "pre_quant_scale": False}
        return found

    linear = {
        t.name.removesuffix(".weight") for t in copied if len(t.shape) == 2 and t.name.endswith(".weight")
    }
    left = {name for name in linear | {HEAD} if name not in layers and "embed" not in name}
    left = {of_all_experts(name) for name in left}
    algorithms = {layer.algorithm for layer in layers.values()}
    said: dict[str, Any] = {"kv_cache_quant_algo": None, "exclude_modules": sorted(left)}
    if len(algorithms) == 1:
        said |= of(algorithms.pop())
    else:
        each = {name: of(layers[name].algorithm) for name in sorted(layers)}
        said |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": each}
    producer = {"name": "dflash-trt", "version": version("dflash-trt")}
    return {"producer": producer, "quantization": said}


def _key(
    checkpoint: Checkpoint, config: Mapping[str, Any], amax: Mapping[str, float], copied: Sequence[TensorInfo]
) -> str:
    """A digest of everything that the result depends on. The source's files count by size and time."""
    files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in checkpoint.files]
    inputs = [config, files, sorted(amax.items()), [tensor.name for tensor in copied]]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _made_as(file: Path, config: Mapping[str, Any]) -> bool:
    """Whether the file says `config`, apart from the digests, which are only known at the end."""
    try:
        found = read_object(file)
    except CheckpointError:
        return False
    producer = found.get("producer")
    if isinstance(producer, dict):
        producer.pop("sha256", None)
    return found == config


def copy_files(source: Path, work: Path) -> None:
    """Copy the tokenizer and generation settings."""
    for path in source.iterdir():
        if path.suffix in _COPIED and path.name not in ("config.json", QUANT_CONFIG, INDEX):
            shutil.copyfile(own_file(source, path), work / path.name)


def _write_config(source: Path, work: Path, quantization: Mapping[str, Any], *, untied: bool) -> None:
    config = read_object(source / "config.json")
    if not config.get("quantization_config"):  # gpt-oss's config describes its experts here
        said = dict(quantization["quantization"])
        said["ignore"] = said.pop("exclude_modules")
        said.pop("kv_cache_quant_algo")
        config["quantization_config"] = {"quant_method": "modelopt", **said}
    if untied and config.get("tie_word_embeddings"):
        config["tie_word_embeddings"] = False
    write_json(work / "config.json", config)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a configuration, which appears when it is whole."""
    with whole_file(path) as file:
        file.write(json.dumps(values, indent=2).encode() + b"\n")
