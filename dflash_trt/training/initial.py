"""Initialize a new drafter from the target, where the target has a similar tensor."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.training.model import DrafterModel

_MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NOISE = 0.1  # scale of the new fc weights beside the copied tap


def start_from_target(drafter: DrafterModel, target: Checkpoint, config: TargetConfig) -> None:
    """Copy the target's last layers, its last tap and its final norm.

    The drafter's rows go through the target's head, so they need the target's final norm. If `fc` passes only the
    last tap on, the drafter's layers see the target's own keys and values of the context. A tensor keeps its random
    start if the target's is missing, quantized or of another shape. An expert layer has no `mlp.gate_proj`, for
    example.
    """
    first = max(0, config.num_hidden_layers - drafter.config.num_hidden_layers)
    for index in range(drafter.config.num_hidden_layers):
        source = f"model.layers.{min(first + index, config.num_hidden_layers - 1)}"
        names = [
            f"{part}.weight" for part in (*_MATRICES, *_MLP, "input_layernorm", "post_attention_layernorm")
        ]
        for name in (*names, "self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            copy_matrix(drafter, f"layers.{index}.{name}", target, f"{source}.{name}")
        if not config.qk_norm:
            for side in "qk":
                _imitate_scale(drafter, index, side, target, source)
    copy_matrix(drafter, "norm.weight", target, "model.norm.weight")
    last = f"model.layers.{config.num_hidden_layers - 1}"
    copy_matrix(drafter, "hidden_norm.weight", target, f"{last}.input_layernorm.weight")
    with torch.no_grad():
        size = drafter.config.hidden_size
        newest = int(np.argmax(drafter.config.target_layer_ids))
        drafter.fc.weight *= _NOISE
        drafter.fc.weight[:, newest * size : (newest + 1) * size] += torch.eye(size)


def read_matrix(target: Checkpoint, name: str) -> Tensor | None:
    """A tensor of the target in float32; None if it is missing or quantized."""
    tensor = target.tensors.get(name)
    if tensor is None or tensor.dtype not in ("BF16", "F16", "F32"):
        return None
    return torch.from_numpy(target.array(name).astype(np.float32))


def copy_matrix(drafter: nn.Module, name: str, target: Checkpoint, source: str) -> None:
    """Copy a tensor of the target, if it can be read and has the shape of the drafter's."""
    value, place = read_matrix(target, source), drafter.get_parameter(name)
    if value is not None and value.shape == place.shape:
        with torch.no_grad():
            place.copy_(value)


def _imitate_scale(drafter: DrafterModel, index: int, side: str, target: Checkpoint, source: str) -> None:
    """Set the drafter's norms of q and k from the size of the target's q and k, if the target has no such norms."""
    matrix = read_matrix(target, f"{source}.self_attn.{side}_proj.weight")
    gain = read_matrix(target, f"{source}.input_layernorm.weight")
    if matrix is None or gain is None:
        return
    place = drafter.get_parameter(f"layers.{index}.self_attn.{side}_norm.weight")
    with torch.no_grad():  # before the gain, rows of the input have a root mean square of 1
        place.fill_(float((matrix * gain).square().sum(1).mean().sqrt()))
