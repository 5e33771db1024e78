"""TensorRT-LLM in a build: the target's files, the drafter as it loads it, the configuration, and the scripts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import yaml

from dflash_trt.bundle.manifest import describe_file
from dflash_trt.bundle.workspace import Progress, Workspace
from dflash_trt.checkpoint.pair import TOKENIZER_FILES, CheckpointPair, tokenizer_files
from dflash_trt.checkpoint.quantization import QUANT_CONFIG
from dflash_trt.checkpoint.schema import DrafterConfig
from dflash_trt.checkpoint.tensors import INDEX, Checkpoint, Outline
from dflash_trt.checkpoint.writer import Entry, write_shard
from dflash_trt.engines.base import BuildJob, BuildSettings
from dflash_trt.engines.packages import TRTLLM_VERSION
from dflash_trt.errors import UsageError
from dflash_trt.files.reading import read_config
from dflash_trt.models.inventory import Inventory, take_inventory
from dflash_trt.trtllm.configuration import CONTAINER, ENGINE, Configuration, configure, describe
from dflash_trt.trtllm.targets import target_quantization
from dflash_trt.version import __version__

_SCRIPTS = Path(__file__).with_name("scripts")
_DROPPED = ("auto_map", "dtype", "torch_dtype")
_DRAFTER = "drafter/model.safetensors"
_TARGET_FILES = (*TOKENIZER_FILES, "config.json", QUANT_CONFIG, INDEX)


@dataclass(kw_only=True)
class ConfigurationJob(BuildJob):
    """Writes the drafter's configuration, `llm_args.yaml` and the launch scripts."""

    configuration: Configuration
    drafter: DrafterConfig | None

    def write(
        self, work: Path, manifest: dict[str, Any], files: dict[str, dict[str, Any]], progress: Progress
    ) -> dict[str, dict[str, Any]]:
        written = launch_files(self.configuration)
        if self.drafter is not None:
            config = json.dumps(drafter_config(self.drafter), indent=2, sort_keys=True) + "\n"
            written = {"drafter/config.json": config, **written}
        for name, text in written.items():
            path = work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755 if text.startswith("#!") else 0o644)
            files[name] = describe_file(path)
        return files


def configuration_job(
    pair: CheckpointPair, settings: BuildSettings, place: Workspace, progress: Progress
) -> ConfigurationJob:
    """TensorRT-LLM's part in a build. Raises BuildError for what it cannot load or run, or what does not fit."""
    target, drafter = pair.target.config, pair.draft_config
    if settings.tree_width > 1:
        raise UsageError(
            f"--tree-width is {settings.tree_width}, but TensorRT-LLM drafts chains; leave the option out"
        )
    quantization = target_quantization(target)
    configuration = configure(
        _inventory(pair),
        settings.options,
        block_size=settings.block_size,
        max_seq_len=settings.max_seq_len,
        quantization=quantization,
    )
    return ConfigurationJob(
        manifest={
            "dialect": ENGINE,
            "precision": {"target": quantization.name, **({"drafter": "bfloat16"} if drafter else {})},
            "target_layer_ids": sorted(drafter.target_layer_ids) if drafter else [],
            "cache_bytes_per_token": {
                "target": configuration.memory.kv_bytes_per_token,
                "drafter": configuration.memory.drafter_bytes_per_token,
            },
            "versions": {"dflash-trt": __version__, ENGINE: TRTLLM_VERSION},
            "tensorrt_llm": describe(configuration),
        },
        files=_files(pair, place, progress),
        link=settings.weights == "link",
        configuration=configuration,
        drafter=drafter,
    )


def _inventory(pair: CheckpointPair) -> Inventory:
    """The tensors of the models. Outlines learn their tensors from it."""
    configs = pair.target.config, pair.draft_config
    checkpoints = [side.checkpoint for side in pair.sides.values()]
    read = [checkpoint for checkpoint in checkpoints if isinstance(checkpoint, Checkpoint)]
    if len(read) == len(checkpoints):
        # TensorRT-LLM's loader ignores unknown tensors and does not notice missing ones.
        return take_inventory(*configs, read)
    inventory = take_inventory(*configs)
    for side, outline in zip(pair.sides, checkpoints, strict=True):
        assert isinstance(outline, Outline)
        outline.tensors = {tensor.name: tensor for tensor in inventory.tensors[side]}
    return inventory


def _files(pair: CheckpointPair, place: Workspace, progress: Progress) -> dict[str, Path]:
    """Files that go into the bundle unchanged. The drafter's weights are rewritten if TensorRT-LLM needs another
    form.
    """
    files = {f"target/{name}": path for name, path in tokenizer_files(pair.target, _TARGET_FILES).items()}
    files |= {f"target/{file.name}": file for file in pair.target.checkpoint.files}
    drafter = pair.drafter
    if drafter is None or not isinstance(drafter.checkpoint, Checkpoint):
        return files
    if as_it_is(drafter.config, drafter.checkpoint):
        return files | {_DRAFTER: drafter.checkpoint.files[0]}
    progress("write drafter", 0, 1)
    written = place.scratch / "drafter.safetensors"
    write_weights(drafter.config, drafter.checkpoint, written)
    progress("write drafter", 1, 1)
    return files | {_DRAFTER: written}


def launch_files(configuration: Configuration) -> dict[str, str]:
    """Name inside the bundle -> text: the configuration, and a script for each way to start it."""
    c = configuration
    world = c.llm_args["tensor_parallel_size"]
    header = (
        f"# TensorRT-LLM {TRTLLM_VERSION} on {world} x {c.gpu.product}; dflash-trt inspect has the reasons.\n"
    )
    files = {"llm_args.yaml": header + yaml.safe_dump(c.llm_args, sort_keys=False)}
    values = {"WORLD": world, "NODES": c.nodes, "GPUS_PER_NODE": c.gpus_per_node, "CONTAINER": CONTAINER}
    for template in sorted(_SCRIPTS.iterdir()):
        text = template.read_text()
        for key, value in values.items():
            text = text.replace(f"@{key}@", str(value))
        files[f"launch/{template.name}"] = text
    return files


def as_it_is(config: DrafterConfig, checkpoint: Checkpoint) -> bool:
    """Whether the weights need no change: taps are ascending, and everything is BF16 in one file."""
    ascending = list(config.target_layer_ids) == sorted(config.target_layer_ids)
    dtypes = {tensor.dtype for tensor in checkpoint.tensors.values()}
    return ascending and dtypes == {"BF16"} and len(checkpoint.files) == 1


def drafter_config(config: DrafterConfig) -> dict[str, Any]:
    """config.json with every field where TensorRT-LLM reads it, and without code to fetch."""
    values = {key: value for key, value in read_config(config.path).items() if key not in _DROPPED}
    dflash = dict(values.get("dflash_config", {}))
    dflash |= {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": sorted(config.target_layer_ids),
        "block_size": config.block_size,
    }
    return values | {
        "architectures": [config.architecture],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": dflash,
        "dtype": "bfloat16",
    }


def write_weights(config: DrafterConfig, checkpoint: Checkpoint, path: Path) -> None:
    """Write one safetensors file in BF16, with the columns of `fc` in the order of ascending taps."""

    def array(name: str) -> np.ndarray[Any, Any]:
        values = checkpoint.array(name)
        if name == "fc.weight":
            taps = config.target_layer_ids
            columns = values.reshape(len(values), len(taps), config.hidden_size)
            values = columns[:, sorted(range(len(taps)), key=taps.__getitem__)].reshape(values.shape)
        return values.astype(ml_dtypes.bfloat16)

    def entry(name: str, shape: tuple[int, ...]) -> Entry:
        return Entry(name, "BF16", shape, ((key, array(key)) for key in (name,)))

    write_shard(path, [entry(name, tensor.shape) for name, tensor in sorted(checkpoint.tensors.items())])
