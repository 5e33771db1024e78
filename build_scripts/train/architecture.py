"""The differences between the two shipped pairs in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import dflash_trt
from build_scripts.train import gpt_oss_chat as train_gpt_oss_chat
from build_scripts.train import gpt_oss_export as train_gpt_oss_export
from build_scripts.train import gpt_oss_model as train_gpt_oss_model
from build_scripts.train.data import Render, chatml, load_tokenizer, packed_rows, train_tokenizer
from build_scripts.train.export import drafter_config, write_json, write_target
from build_scripts.train.model import Shape, Target
from dflash_trt.models.configs import read_drafter_config
from dflash_trt.training.checkpoint import write_checkpoint
from dflash_trt.training.model import Drafter

TINY = Path(dflash_trt.__file__).parent / "shipped" / "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One pair: its sizes, and how its parts begin, are written and are read back.

    `render` makes the texts that are trained on. `rates` are the learning rates of the rest and of the matrices. `seed`
    is that of the first worker's documents, so that what begins as another pair sees other ones. `begin_drafter` writes
    the drafter to go on from, where it is not a new one.
    """

    shape: Shape
    seed: int
    render: Render
    rates: tuple[float, float]
    new_tokenizer: Callable[[], Tokenizer]
    new_target: Callable[[], Target]
    write_target: Callable[[Target, Path, Path], None]
    load_target: Callable[[Path], Target]
    begin_drafter: Callable[[Path], None] | None = None


def load_qwen3(directory: Path) -> Target:
    """The target with the exact values of its BF16 file, in float32."""
    target = Target(Shape())
    weights = load_file(directory / "model.safetensors")
    target.load_state_dict(
        {name.removeprefix("model."): w.float() for name, w in weights.items() if "lm_head" not in name}
    )
    return target


def begin_drafter(shape: Shape, directory: Path) -> None:
    """Write `tiny`'s drafter in the form of another pair's: with biases, of 0, and for the RoPE of that pair."""
    directory.mkdir(parents=True, exist_ok=True)
    config = drafter_config(shape)
    write_json(directory / "config.json", config)
    weights = load_file(TINY / "drafter" / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weights[name] = weight.float() / shape.rotary_factor
    for name, value in Drafter(read_drafter_config(directory)).state_dict().items():
        if name.endswith(".bias"):
            weights[name] = value * 0
    write_checkpoint(weights, config, directory, "The beginning of a drafter for another form of `tiny`.\n")


def qwen3() -> Architecture:
    shape = Shape()
    return Architecture(
        shape=shape,
        seed=0,
        render=chatml,
        rates=(3e-3, 0.02),
        new_tokenizer=partial(train_tokenizer, shape.vocab_size),
        new_target=partial(Target, shape),
        write_target=write_target,
        load_target=load_qwen3,
    )


def gpt_oss() -> Architecture:
    """gpt-oss, with target and drafter initialized from the shipped pair `tiny`."""
    shape = train_gpt_oss_model.gpt_oss_shape(train_gpt_oss_chat.VOCAB_SIZE)

    def new_target() -> Target:
        target = train_gpt_oss_model.GptOss(shape)
        tokenizer = load_tokenizer(TINY / "target")
        few = zip(*islice(packed_rows(tokenizer, 512, 0), 4), strict=True)
        tokens, _, documents, positions = (torch.from_numpy(np.stack(column)) for column in few)
        stand_ins = train_gpt_oss_chat.stand_ins(tokenizer)
        source = load_qwen3(TINY / "target")
        train_gpt_oss_model.warm_start(target, source, [tokens, documents, positions], stand_ins)
        return target

    return Architecture(
        shape=shape,
        seed=10,
        render=train_gpt_oss_chat.render,
        rates=(1e-3, 0.006),
        new_tokenizer=partial(train_gpt_oss_chat.make_tokenizer, TINY / "target"),
        new_target=new_target,
        write_target=train_gpt_oss_export.write_target,
        load_target=partial(train_gpt_oss_export.load_target, shape),
        begin_drafter=partial(begin_drafter, shape),
    )


ARCHITECTURES = {"qwen3": qwen3, "gpt-oss": gpt_oss}
