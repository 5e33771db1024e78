"""Train a drafter step by step. The state is saved, so a killed run resumes as if it had not been interrupted: weights
and optimizer in safetensors, the rest in JSON. No pickle.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil  # a requirement of accelerate
import torch
from accelerate import Accelerator, PartialState
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from dflash_trt.errors import DFlashError
from dflash_trt.files.disk import write_object
from dflash_trt.files.reading import read_object
from dflash_trt.training.blocks import Batches, draw_blocks, head_loss
from dflash_trt.training.checkpoint import whole_folder, write_tensors
from dflash_trt.training.dflash2 import Selection
from dflash_trt.training.model import DrafterModel, dense_mask, flex_mask
from dflash_trt.training.recipe import Recipe
from dflash_trt.training.target import FeatureStore, FrozenTarget, matrix_dtype

_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SEPARATOR = "|"

_SHARES = (1.0, 0.1)  # of the rate, for matrices and for the rest
Optimizers = Sequence[torch.optim.Optimizer]


def train(
    drafter: DrafterModel,
    target: FrozenTarget,
    batches: Batches,
    recipe: Recipe,
    out: Path,
    accelerator: Accelerator,
    *,
    save_every: int = 50,
    evaluate_every: int = 0,
    on_weights: Callable[[int, dict[str, Tensor]], None] | None = None,
    report: Callable[[dict[str, Any]], None] = lambda line: None,
) -> None:
    """Train until `recipe.steps` steps are done, or the process is asked to end.

    Files in `out`: `state/`, saved every `save_every` steps and when the process is asked to end; `log.jsonl`, a line
    per 10 steps; `recipe.json`. A call that finds a state resumes it. `on_weights(step, weights)` is called before the
    first step, every `evaluate_every` steps and at the end; `report(line)` after each step. Both are called in the
    first process only.

    Raises DFlashError if `out` holds a run with another recipe.
    """
    out.mkdir(parents=True, exist_ok=True)
    _same_recipe(out / "recipe.json", recipe, accelerator)
    module, *optimizers = accelerator.prepare(drafter, *_optimizers(drafter))
    start = load_state(out / "state", module, optimizers)
    first = accelerator.is_main_process
    store = _store(drafter, target, batches, recipe, out, accelerator)
    log = _Log(out / "log.jsonl", accelerator.device, report)

    def weigh(step: int) -> None:
        weights = accelerator.get_state_dict(module)
        if first and on_weights is not None:
            on_weights(step, weights)
        accelerator.wait_for_everyone()

    if start == 0:
        weigh(0)
    with _asked_to_end() as asked:
        for step in range(start, recipe.steps):
            rate = recipe.rate(step)
            for optimizer, share in zip(optimizers, _SHARES, strict=True):
                optimizer.param_groups[0]["lr"] = share * rate
            loss, blocks = _step(module, target, batches, recipe, step, accelerator, store)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(module.parameters(), recipe.clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            flag = torch.tensor([float(asked())], device=accelerator.device)
            total: Any = accelerator.reduce(flag, "sum")  # all processes stop after the same step
            done, ending = step + 1, bool(total.item() > 0)
            if first:
                log.add(done, loss.item(), rate, blocks)
            if done % save_every == 0 or ending or done == recipe.steps:
                save_state(out / "state", module, optimizers, done, write=first)
            if ending:
                return
            if done == recipe.steps or (evaluate_every and done % evaluate_every == 0):
                weigh(done)
    if store is not None:
        store.remove()


def _optimizers(drafter: DrafterModel) -> Optimizers:
    """Muon for matrices, with updates of AdamW's size, and AdamW for the rest. Each step sets their rates."""
    matrices = [parameter for parameter in drafter.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in drafter.parameters() if parameter.ndim != 2]
    return (
        torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0),
    )


def _store(
    drafter: DrafterModel,
    target: FrozenTarget,
    batches: Batches,
    recipe: Recipe,
    out: Path,
    accelerator: Accelerator,
) -> FeatureStore | None:
    """On a CPU, the features are kept if a step will ask for them again: there the target's pass takes most of a step,
    where a GPU computes it about as fast as a disk reads.
    """
    again = recipe.steps * accelerator.num_processes > batches.per_epoch
    if accelerator.device.type != "cpu" or not again:
        return None
    config = drafter.config
    taps, final = len(config.target_layer_ids) * config.hidden_size, (recipe.distill > 0) * config.hidden_size
    return FeatureStore(out / f"features-{accelerator.process_index}", target, batches, taps, final)


class _Log:
    """Reports every step. Every tenth is a line of the log. A loss is the mean of the last ten."""

    def __init__(self, file: Path, device: torch.device, report: Callable[[dict[str, Any]], None]) -> None:
        self._file, self._device, self._report = file, device, report
        self._began, self._blocks, self._losses = time.monotonic(), 0, deque[float](maxlen=10)

    def add(self, step: int, loss: float, rate: float, blocks: int) -> None:
        self._blocks += blocks
        self._losses.append(loss)
        line = {
            "step": step,
            "loss": round(sum(self._losses) / len(self._losses), 4),
            "learning_rate": rate,
            "blocks": self._blocks,
            "seconds": round(time.monotonic() - self._began, 1),
            # On a GPU those of torch, else this process's resident memory.
            "memory_bytes": torch.cuda.memory_reserved(self._device)
            if self._device.type == "cuda"
            else psutil.Process().memory_info().rss,
        }
        if step % 10 == 0:
            with self._file.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        self._report(line)


def _step(
    module: nn.Module,
    target: FrozenTarget,
    batches: Batches,
    recipe: Recipe,
    step: int,
    accelerator: Accelerator,
    store: FeatureStore | None = None,
) -> tuple[Tensor, int]:
    """The loss of this process's batch, and its number of blocks."""
    drafter = accelerator.unwrap_model(module)
    device, config = accelerator.device, drafter.config
    number = step * accelerator.num_processes + accelerator.process_index
    batch = batches(number)
    generator = torch.Generator().manual_seed(recipe.seed + (number << 20))
    features, final = target.features(batch.tokens.to(device)) if store is None else store(batch)
    blocks = draw_blocks(
        batch.tokens.to(device),
        batch.first.to(device),
        batch.ends.to(device),
        anchors=recipe.anchors,
        size=config.block_size,
        mask_token_id=config.mask_token_id,
        shorter=recipe.shorter,
        generator=generator,
    )
    width = batch.tokens.shape[1]
    make = flex_mask if device.type == "cuda" else dense_mask
    masks = {
        kind: make(kind, blocks.anchors, blocks.lengths, width, config.block_size)
        for kind in set(config.layers)
    }
    positions = torch.arange(width, device=device).expand(len(batch.tokens), -1)
    size, tokens, valid = config.block_size, blocks.labels.flatten(0, 1), blocks.valid.flatten(0, 1)
    teacher = None
    if recipe.distill and final is not None:
        # The row at a position predicts its token. The target's row before it does the same.
        before = (blocks.positions - 1).clamp(0, width - 1)
        teacher = final.gather(1, before[..., None].expand(-1, -1, final.shape[-1]))
        teacher = teacher.reshape(-1, size, final.shape[-1])
    asked: dict[str, Any] = {}
    if drafter.selects:
        task = tokens, valid, target.head, target.embedding, teacher, recipe.distill
        asked["selection"] = Selection(*task)
    with accelerator.autocast():
        hidden = module(features, positions, target.embed(blocks.tokens), blocks.positions, masks, **asked)
    hidden, added = hidden if asked else (hidden, None)
    rows = hidden.reshape(-1, size, hidden.shape[-1])
    loss, _ = head_loss(rows, target.head, tokens, valid, teacher=teacher, share=recipe.distill)
    return loss if added is None else loss + added, int((blocks.anchors >= 0).sum())


def save_state(folder: Path, module: nn.Module, optimizers: Optimizers, step: int, *, write: bool) -> None:
    """Save the state after `step` steps. All processes call this; only the one with `write` writes."""
    weights, state = get_state_dict(module, optimizers, options=_OPTIONS)
    if not write:
        return
    tensors = {f"model{_SEPARATOR}{name}": value for name, value in weights.items()}
    for name, values in state["state"].items():
        for key, value in values.items():
            tensors[f"optimizer{_SEPARATOR}{name}{_SEPARATOR}{key}"] = torch.as_tensor(value)
    with whole_folder(folder) as work:
        write_tensors(
            {name: value.contiguous() for name, value in tensors.items()}, work / "state.safetensors"
        )
        write_object(work / "state.json", {"step": step})


def load_state(folder: Path, module: nn.Module, optimizers: Optimizers) -> int:
    """Restore the last complete state. Returns the number of finished steps, 0 without a state.

    Raises DFlashError if the state belongs to another model or optimizer.
    """
    # A kill between two renames leaves only the old one.
    places = (folder, folder.with_name(f".{folder.name}.old"))
    place = next((candidate for candidate in places if (candidate / "state.json").exists()), None)
    if place is None:
        return 0
    step = read_object(place / "state.json")["step"]
    weights: dict[str, Any] = {}
    state: dict[str, dict[str, Tensor]] = {}
    for name, value in load_file(place / "state.safetensors").items():
        kind, _, rest = name.partition(_SEPARATOR)
        if kind == "model":
            weights[rest] = value
        else:
            parameter, _, key = rest.rpartition(_SEPARATOR)
            state.setdefault(parameter, {})[key] = value
    # Offloaded to the CPU, the dictionaries exist in the first process only. Here every process needs them.
    _, current = get_state_dict(module, optimizers, options=StateDictOptions(full_state_dict=True))
    if {n: set(v) for n, v in current["state"].items()} != {n: set(v) for n, v in state.items()}:  # type: ignore[arg-type]
        raise DFlashError(f"{place}: belongs to another drafter or optimizer; choose another --out")
    held: dict[str, Any] = {"state": state, "param_groups": current["param_groups"]}
    set_state_dict(module, optimizers, model_state_dict=weights, optim_state_dict=held, options=_OPTIONS)
    return int(step)


def make_accelerator() -> Accelerator:
    """The accelerator as `accelerate launch` configures it. Default precision: BF16 if the hardware supports it."""
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION")
    cpu = not torch.accelerator.is_available()  # accelerate joins processes on CPUs only if it is told
    fast = matrix_dtype(PartialState(cpu=cpu).device) == torch.bfloat16
    return Accelerator(cpu=cpu, mixed_precision=asked or ("bf16" if fast else "no"))


def same_as_before(file: Path, values: Mapping[str, Any], but: str = "") -> None:
    """Raise DFlashError where a run in this place has begun with other values, `but` one."""
    before = read_object(file) if file.exists() else values
    for key in values | before:
        if key != but and before.get(key) != values.get(key):
            raise DFlashError(
                f"{file}: {key} is {before.get(key)}, but now {values.get(key)}: a run continues as it began; choose "
                "another --out"
            )


def _same_recipe(file: Path, recipe: Recipe, accelerator: Accelerator) -> None:
    values = {**asdict(recipe), "processes": accelerator.num_processes}
    same_as_before(file, values, but="steps")
    accelerator.wait_for_everyone()  # the others read what was there before
    if accelerator.is_main_process:
        write_object(file, values)


@contextmanager
def _asked_to_end() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or SIGINT has arrived. The current step is finished first."""
    came: list[int] = []
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(kind, lambda number, _: came.append(number)) for kind in kinds]
    try:
        yield lambda: bool(came)
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
