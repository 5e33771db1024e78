"""`dflash-trt build --engine tensorrt-llm`: the checkpoints' files, and what TensorRT-LLM needs to run them."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dflash_trt.building.build import (
    TOKENIZER_FILES,
    Side,
    Weights,
    choose_block_size,
    choose_max_seq_len,
    own_files,
)
from dflash_trt.building.sources import Source
from dflash_trt.bundle import manifest as bundle
from dflash_trt.bundle.contents import bring, describe_file, key_of, read_inputs
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.bundle.workspace import Progress, silent, workspace
from dflash_trt.checkpoint.compatibility import check_pair, check_tokenizers
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.errors import BuildError
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.planning.inventory import Inventory, take_inventory
from dflash_trt.trtllm.configuration import Configuration, Deployment, configure, describe
from dflash_trt.trtllm.drafter import as_it_is, drafter_config, write_weights
from dflash_trt.trtllm.launch import launch_files
from dflash_trt.trtllm.quantization import check_drafter, target_quantization

_DRAFTER = "drafter/model.safetensors"
_INDEX = "model.safetensors.index.json"
_TARGET_FILES = (*TOKENIZER_FILES, "config.json", "hf_quant_config.json", _INDEX)


def build_deployment(
    sources: tuple[Source, Source],
    out: Path,
    deployment: Deployment,
    *,
    max_seq_len: int | None,
    block_size: int | None,
    weights: Weights,
    force: bool,
    progress: Progress | None = None,
) -> Bundle:
    """Write a bundle for TensorRT-LLM; arguments and errors as `dflash_trt.building.build.build`.

    The target's files are taken as they are; so are the drafter's weights where their form is TensorRT-LLM's.
    """
    progress = progress or silent
    progress("read checkpoints", 0, 1)
    target, drafter = read_target_config(sources[0].directory), read_drafter_config(sources[1].directory)
    quantization = target_quantization(target)
    check_drafter(sources[1].directory)
    check_pair(target, drafter)
    checkpoints: tuple[Checkpoint | Outline, Checkpoint | Outline]
    if weights == "none":
        inventory = take_inventory(target, drafter)
        checkpoints = _outlines(inventory)
    else:
        check_tokenizers(sources[0].directory, sources[1].directory, drafter.mask_token_id)
        opened = Checkpoint(sources[0].directory), Checkpoint(sources[1].directory)
        # TensorRT-LLM's loader leaves out what it does not know, and does not miss what is not there.
        inventory, checkpoints = take_inventory(target, drafter, opened), opened
    sides = (
        Side(sources[0], target, checkpoints[0], "target"),
        Side(sources[1], drafter, checkpoints[1], "drafter"),
    )
    size = choose_block_size(block_size, drafter)
    length = choose_max_seq_len(max_seq_len, target, drafter)
    configuration = configure(
        inventory, deployment, block_size=size, max_seq_len=length, quantization=quantization
    )
    progress("read checkpoints", 1, 1)
    manifest: dict[str, Any] = {
        "format_version": bundle.FORMAT_VERSION,
        "key": "",
        "engine": "tensorrt-llm",
        "dialect": "tensorrt-llm",
        "precision": {"target": quantization.scheme or "bfloat16", "drafter": "bfloat16"},
        "weights": weights,
        "target": sides[0].describe(),
        "drafter": sides[1].describe(),
        "block_size": size,
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": sorted(drafter.target_layer_ids),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "max_seq_len": length,
        "cache_bytes_per_token": {
            "target": configuration.plan.kv_bytes_per_token,
            "drafter": configuration.plan.drafter_bytes_per_token,
        },
        "eos_token_ids": list(target.eos_token_ids),
        "versions": {"dflash-trt": version("dflash-trt"), "tensorrt-llm": configuration.release.version},
        "tensorrt_llm": describe(configuration),
    }
    with workspace(out, "bundle") as place:
        wanted = _wanted(sides)
        if weights != "none" and _DRAFTER not in wanted:
            assert isinstance(sides[1].checkpoint, Checkpoint)
            progress("write drafter", 0, 1)
            wanted[_DRAFTER] = place.scratch / "drafter.safetensors"
            write_weights(drafter, sides[1].checkpoint, wanted[_DRAFTER])
            progress("write drafter", 1, 1)
        inputs = read_inputs(wanted, place, progress)
        manifest["key"] = key_of(manifest, inputs)
        existing = place.existing(manifest["key"], force=force)
        if existing is not None:
            place.done = True
            return existing
        files = bring(inputs, place, progress, link=weights == "link")
        for name, text in _generated(sides, configuration).items():
            path = place.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755 if text.startswith("#!") else 0o644)
            files[name] = describe_file(path)
        manifest["files"] = {name: files[name] for name in sorted(files)}
        bundle.write_manifest(place.path, manifest)
        place.publish()
    return Bundle.open(out)


def _outlines(inventory: Inventory) -> tuple[Outline, Outline]:
    found = Outline(inventory.target.path.parent), Outline(inventory.drafter.path.parent)
    for outline, side in zip(found, ("target", "drafter"), strict=True):
        outline.tensors = {tensor.name: tensor for tensor in inventory.tensors[side]}
    return found


def _wanted(sides: tuple[Side, Side]) -> dict[str, Path]:
    """Files that go into the bundle as they are: their names there, and where they are now."""
    directory, drafter = sides[0].source.directory, sides[1]
    wanted = {f"target/{name}": path for name, path in own_files(directory, _TARGET_FILES).items()}
    if isinstance(sides[0].checkpoint, Checkpoint):
        if "target/tokenizer.json" not in wanted:
            raise BuildError(
                f"{directory}: no tokenizer.json; save the tokenizer in the fast (tokenizers) format there"
            )
        wanted |= {f"target/{file.name}": file for file in sides[0].checkpoint.files}
    if isinstance(drafter.checkpoint, Checkpoint):
        config = read_drafter_config(drafter.source.directory)
        if as_it_is(config, drafter.checkpoint):
            wanted[_DRAFTER] = drafter.checkpoint.files[0]
    return wanted


def _generated(sides: tuple[Side, Side], configuration: Configuration) -> dict[str, str]:
    drafter = read_drafter_config(sides[1].source.directory)
    text = json.dumps(drafter_config(drafter), indent=2, sort_keys=True) + "\n"
    return {"drafter/config.json": text, **launch_files(configuration)}
