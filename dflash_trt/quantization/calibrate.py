"""Calibration through ONNX Runtime: the largest magnitude that each linear layer's input reaches over a set of prompts.

The pair's own graphs run, unquantized, with one more output per layer. No torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.config import read_drafter_config, read_target_config
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.onnxruntime import OnnxRuntimeEngine
from dflash_trt.errors import BuildError
from dflash_trt.graph.builder import FLOAT
from dflash_trt.graph.functions import OnnxRuntime
from dflash_trt.models.drafter import build_drafter
from dflash_trt.models.target import build_target
from dflash_trt.tokenizer import Tokenizer
from dflash_trt.verification import read_prompts
from dflash_trt.workspace import Progress, gather, silent

# Of each prompt so much is read, and so many tokens are decoded after it.
PROMPT_TOKENS, DECODED_TOKENS = 1024, 32
_OBSERVED = "observed/"


def calibration_set(directory: Path, file: Path | None) -> list[list[int]]:
    """Token ids of the prompts in a JSONL file, or of those that come with the package, by the target's tokenizer."""
    tokenizer, found = Tokenizer(directory), []
    for prompt in read_prompts(file, 0):
        if isinstance(prompt.content, str):
            ids = tokenizer.encode(prompt.content)
        else:
            text = tokenizer.apply_chat_template(prompt.content)
            ids = tokenizer.encode(text, add_special_tokens=False)
        found.append(ids[:PROMPT_TOKENS])
    return [ids for ids in found if ids]


def activation_amax(
    target: Path,
    drafter: Path | None,
    prompts: Sequence[Sequence[int]],
    *,
    work: Path,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Layer -> largest magnitude of its input, of the drafter, or of the target where there is no drafter.

    The target decodes greedily after each prompt; the drafter takes in what it read and drafts a block after the prompt
    and one after what was decoded. `work` is a directory on the checkpoints' file system, for links to their files.
    """
    config = read_target_config(target)
    checkpoints = {"target": Checkpoint(target)}
    taps: Sequence[int] = (0,)
    if drafter is not None:
        drafter_config = read_drafter_config(drafter)
        check_pair(config, drafter_config)
        checkpoints["drafter"], taps = Checkpoint(drafter), drafter_config.target_layer_ids
    for checkpoint in checkpoints.values():
        if checkpoint.quantization.name is not None:
            raise BuildError(f"{checkpoint.directory}: is quantized already; calibrate with the original one")
    dialect = OnnxRuntime()
    graphs = {"target": build_target(config, checkpoints["target"], taps, dialect, folder="weights/target")}
    room = PROMPT_TOKENS + DECODED_TOKENS + 2
    if drafter is not None:
        graphs["drafter"] = build_drafter(
            drafter_config,
            checkpoints["drafter"],
            config,
            checkpoints["target"],
            dialect,
            folder="weights/drafter",
            target_folder="weights/target",
        )
        room += 2 * drafter_config.block_size
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work.resolve(), prefix=".calibrating-") as scratch:
        folder = Path(scratch)
        wanted = {f"weights/{role}/{f.name}": f for role, c in checkpoints.items() for f in c.files}
        gather(wanted, folder, silent)
        engines = {}
        for role, model in graphs.items():
            if role == "drafter" or drafter is None:
                _observe(model)
            ir.save(model, folder / f"{role}.onnx")
            engines[role] = OnnxRuntimeEngine(folder / f"{role}.onnx", slots=1, capacity=room)
        largest: dict[str, float] = {}
        for done, prompt in enumerate(prompts):
            (progress or silent)("calibrate", done, len(prompts))
            block = np.full((1, drafter_config.block_size), drafter_config.mask_token_id) if drafter else None
            _run(engines, prompt, block, largest)
        (progress or silent)("calibrate", len(prompts), len(prompts))
        for engine in engines.values():
            engine.close()
    return largest


def _run(
    engines: Mapping[str, OnnxRuntimeEngine],
    prompt: Sequence[int],
    block: np.ndarray[Any, Any] | None,
    largest: dict[str, float],
) -> None:
    """One prompt, then greedy tokens one by one."""
    position, tokens, fresh = 0, list(prompt), []
    for step in range(DECODED_TOKENS + 1):
        feeds = {
            "tokens": np.array([tokens]),
            "start": np.array([position]),
            "rows": np.array([[len(tokens) - 1]]),
        }
        out = engines["target"].run(feeds)
        _note(out, largest)
        fresh.append(np.array(out["features"]))
        position, tokens = position + len(tokens), [int(out["logits"][0, 0].argmax())]
        if block is not None and step in (0, DECODED_TOKENS):
            features = np.concatenate(fresh, axis=1)
            fresh.clear()
            block[0, 0] = tokens[0]
            count = features.shape[1]
            feeds = {
                "features": features,
                "n_features": np.array([count]),
                "start": np.array([position - count]),
                "block": block,
            }
            _note(engines["drafter"].run(feeds), largest)


def _note(outputs: Mapping[str, np.ndarray[Any, Any]], largest: dict[str, float]) -> None:
    for name, value in outputs.items():
        if name.startswith(_OBSERVED):
            layer = name.removeprefix(_OBSERVED)
            largest[layer] = max(largest.get(layer, 0.0), float(value.item()))


def _observe(model: ir.Model) -> None:
    """Give the graph an output per linear layer: the largest magnitude in its input."""
    for node in list(model.graph):
        if node.op_type != "Gemm":
            continue
        x, weight = node.inputs[0], node.inputs[1]
        widening = weight.producer() if weight is not None else None
        if widening is not None:
            weight = widening.inputs[0]
        name = weight.name if weight is not None else None
        if name is None or weight is None or weight.const_value is None:
            continue
        layer = name.rpartition("/")[2].removesuffix(".weight")
        magnitude = ir.node("Abs", [x])
        top = ir.node("ReduceMax", [magnitude.outputs[0]], attributes={"keepdims": 1})
        model.graph.extend([magnitude, top])
        value = top.outputs[0]
        value.name, value.type, value.shape = f"{_OBSERVED}{layer}", ir.TensorType(FLOAT), ir.Shape([1, 1])
        model.graph.outputs.append(value)
