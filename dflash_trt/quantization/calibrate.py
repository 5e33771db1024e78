"""Calibrate with ONNX Runtime: the largest magnitude of each linear layer's input over a set of prompts.

The pair's own unquantized graphs run with one more output per layer. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt.bundle.contents import hard_link
from dflash_trt.bundle.workspace import Progress, silent
from dflash_trt.checkpoint.compatibility import check_pair
from dflash_trt.checkpoint.schema import Activation, DrafterConfig, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from dflash_trt.errors import BuildError
from dflash_trt.files.disk import clone, copy, temporary_folder
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.graph.quantized_experts import Projection, Stack, onnxruntime_experts, onnxruntime_inputs
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.drafters import build_drafter
from dflash_trt.models.target import build_target
from dflash_trt.prompts import read_prompts
from dflash_trt.text.tokenizer import Tokenizer

# Prompt tokens that are read, and tokens that are decoded after them.
PROMPT_TOKENS, DECODED_TOKENS = 1024, 32
_OBSERVED, _FIRST_EXPERT = "observed/", ".experts.0."


def calibration_set(directory: Path, file: Path | None) -> list[list[int]]:
    """Token ids of the prompts in a JSONL file, or of the shipped prompts, by the target's tokenizer."""
    tokenizer, prompts = Tokenizer(directory), []
    for prompt in read_prompts(file, 0):
        if isinstance(prompt.content, str):
            ids = tokenizer.encode(prompt.content)
        else:
            text = tokenizer.apply_chat_template(prompt.content)
            ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.append(ids[:PROMPT_TOKENS])
    return [ids for ids in prompts if ids]


def activation_amax(
    target: Path,
    drafter: Path | None,
    prompts: Sequence[Sequence[int]],
    *,
    work: Path,
    progress: Progress = silent,
) -> dict[str, float]:
    """Layer -> largest magnitude of its input, for the drafter, or for the target if there is no drafter.

    The experts of a layer share one value, as in Model Optimizer, because some experts may not see a single token.

    The target decodes greedily after each prompt. The drafter reads the target's features. It drafts one block after
    the prompt and one after the decoded tokens. `work` is a directory on the checkpoints' file system, for links to
    their files.
    """
    config = read_target_config(target)
    of_drafter = None if drafter is None else read_drafter_config(drafter, config)
    checkpoints = {"target": Checkpoint(target)}
    if drafter is not None:
        checkpoints["drafter"] = Checkpoint(drafter)
    largest: dict[str, float] = {}
    work.mkdir(parents=True, exist_ok=True)
    with temporary_folder(dir=work.resolve(), prefix=".calibrating-") as folder:
        engines = _engines(config, of_drafter, checkpoints, folder)
        for done, prompt in enumerate(prompts):
            progress("calibrate", done, len(prompts))
            _run(engines, of_drafter, prompt, largest)
        progress("calibrate", len(prompts), len(prompts))
        for engine in engines.values():
            engine.close()
    for name in [name for name in largest if _FIRST_EXPERT in name]:
        for e in range(config.moe.num_experts if config.moe else 0):
            largest[name.replace(_FIRST_EXPERT, f".experts.{e}.")] = largest[name]
    return largest


def _engines(
    config: TargetConfig,
    of_drafter: DrafterConfig | None,
    checkpoints: Mapping[str, Checkpoint],
    folder: Path,
) -> dict[str, OnnxRuntimeEngine]:
    """The graphs by role, in `folder` beside links to their weights. The drafter's is observed, or the target's."""
    for role, checkpoint in checkpoints.items():
        if checkpoint.quantization.name is not None:
            raise BuildError(
                f"{checkpoint.directory}: is already quantized; calibrate with the original checkpoint"
            )
        (folder / "weights" / role).mkdir(parents=True)
        for file in checkpoint.files:
            source, there = file.resolve(), folder / "weights" / role / file.name
            if not (hard_link(source, there) or clone(source, there)):
                copy(source, there)
    dialect = OnnxRuntime() if of_drafter else _Observing()
    dialect.joins_floats = False  # each layer is found by its name
    target, room = checkpoints["target"], PROMPT_TOKENS + DECODED_TOKENS + 2
    if of_drafter is None:
        graphs = {"target": build_target(config, target, (0,), dialect, folder="weights/target")}
        _observe(graphs["target"])
    else:
        check_pair(config, of_drafter)
        taps, room = of_drafter.target_layer_ids, room + 2 * of_drafter.block_size
        parts = of_drafter, checkpoints["drafter"], config, target, dialect
        graphs = {
            "target": build_target(config, target, taps, dialect, folder="weights/target"),
            "drafter": build_drafter(*parts, folder="weights/drafter", target_folder="weights/target"),
        }
        _observe(graphs["drafter"])
    engines = {}
    for role, graph in graphs.items():
        ir.save(graph, folder / f"{role}.onnx")
        engines[role] = OnnxRuntimeEngine(folder / f"{role}.onnx", slots=1, capacity=room)
    return engines


def _run(
    engines: Mapping[str, OnnxRuntimeEngine],
    of_drafter: DrafterConfig | None,
    prompt: Sequence[int],
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
        if of_drafter is not None and step in (0, DECODED_TOKENS):
            features = np.concatenate(fresh, axis=1)
            fresh.clear()
            count = features.shape[1]
            feeds = {
                "features": features,
                "n_features": np.array([count]),
                "start": np.array([position - count]),
                "block": np.array([[*tokens, *[of_drafter.mask_token_id] * (of_drafter.block_size - 1)]]),
            }
            _note(engines["drafter"].run(feeds), largest)


class _Observing(OnnxRuntime):
    """Adds outputs to expert layers. A layer's experts share one value, under the first expert's name."""

    experts_apart = True

    def quantized_experts(
        self,
        g: GraphBuilder,
        x: ir.Value,
        router: ir.Value,
        stacks: Mapping[Projection, Stack],
        folder: str,
        *,
        k: int,
        widened_bytes: int,
        activation: Activation = "silu",
        scales: ir.Value | None = None,
    ) -> ir.Value:
        inputs = [value for stack in stacks.values() for value in onnxruntime_inputs(g, stack, folder)]
        inputs += [] if scales is None else [scales]
        body = onnxruntime_experts(
            stacks, resident=False, observed=True, activation=activation, scaled=scales is not None
        )
        y, largest = g.call(body, x, router, *inputs, outputs=2, name="experts", k=k)
        for stack, value in zip(stacks.values(), (x, x, largest), strict=True):
            _output(g.graph, value, stack.plain[0].name)
        return y


def _note(outputs: Mapping[str, np.ndarray[Any, Any]], largest: dict[str, float]) -> None:
    for name, value in outputs.items():
        if name.startswith(_OBSERVED):
            layer = name.removeprefix(_OBSERVED)
            largest[layer] = max(largest.get(layer, 0.0), float(value.item()))


def _observe(model: ir.Model) -> None:
    """Give the graph one output per linear layer: the largest magnitude of its input."""
    for node in [node for node in model.graph if node.op_type == "Gemm"]:
        x, weight = node.inputs[:2]
        if weight is not None and (widening := weight.producer()) is not None:
            weight = widening.inputs[0]
        if x is not None and weight is not None and weight.name and weight.const_value is not None:
            _output(model.graph, x, weight.name.rpartition("/")[2])


def _output(graph: ir.Graph, x: ir.Value, weight: str) -> None:
    """Output the largest magnitude of x, under the name of the layer that reads x."""
    magnitude = ir.node("Abs", [x])
    top = ir.node("ReduceMax", [magnitude.outputs[0]], attributes={"keepdims": 0})
    graph.extend([magnitude, top])
    value = top.outputs[0]
    value.name = f"{_OBSERVED}{weight.removesuffix('.weight')}"
    value.type, value.shape = ir.TensorType(FLOAT), ir.Shape([])
    graph.outputs.append(value)
