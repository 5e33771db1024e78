"""Optimizers, schedule, and a training loop that stops on time and can be resumed.

On a CPU, one worker process per core is faster than one process with many threads. Each has one thread and its own
rows. It also does not stall when the cores are shared: the workers meet once per step, to average gradients.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn


def orthogonalize(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of a stack [N, rows, cols] (Newton-Schulz, K. Jordan's Muon)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum with an orthogonalized direction, for matrices [..., rows, cols]. Equal shapes are stacked."""

    def __init__(
        self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            stacks: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                stacks.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in stacks.items():
                directions = []
                for parameter in parameters:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    moving = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                    directions.append(parameter.grad.lerp(moving, group["momentum"]))
                scale = group["lr"] * max(1.0, shape[-2] / shape[-1]) ** 0.5
                for parameter, update in zip(parameters, orthogonalize(torch.stack(directions)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["decay"])
                    parameter.sub_(update, alpha=scale)


def optimizers_of(module: nn.Module, lr: float, matrix_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers and AdamW for the rest; AdamW alone if matrix_lr is 0."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        other = any(part in name for part in ("embed", "lm_head", "router", "bias"))
        hidden = matrix_lr > 0 and parameter.ndim >= 2 and not other
        (matrices if hidden else rest).append(parameter)
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    ]
    if matrices:
        made.append(Muon(matrices, matrix_lr))
    return made


def schedule(progress: float, warmup: float = 0.04, floor: float = 0.02) -> float:
    """Factor on the learning rate at a share of the run: linear warm-up, then a cosine down to `floor`."""
    if progress < warmup:
        return (progress + 1e-3) / (warmup + 1e-3)
    done = min(1.0, (progress - warmup) / (1 - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train: minutes of wall time, or a number of steps if steps is not 0."""

    minutes: float
    steps: int = 0

    def progress(self, step: int, seconds: float) -> float:
        return step / self.steps if self.steps else seconds / (60 * self.minutes)


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def run_workers(arguments: list[str], workers: int, meeting_file: Path) -> None:
    """Run this program again in `workers` processes that know each other. Raises if one fails."""
    meeting_file.unlink(missing_ok=True)
    started = []
    for number in range(workers):
        known = {"OMP_NUM_THREADS": "1", "TRAIN_RANK": str(number), "TRAIN_WORKERS": str(workers)}
        known["TRAIN_MEETING"] = str(meeting_file.absolute())
        started.append(subprocess.Popen([sys.executable, *arguments], env={**os.environ, **known}))
    if codes := [code for process in started if (code := process.wait())]:
        raise SystemExit(codes[0])


def join_workers() -> bool:
    """Join the other workers if this process is one of `run_workers`. Returns whether it is."""
    if "TRAIN_RANK" not in os.environ:
        return False
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['TRAIN_MEETING']}",
        rank=int(os.environ["TRAIN_RANK"]),
        world_size=int(os.environ["TRAIN_WORKERS"]),
    )
    return True


def agree(parameters: list[nn.Parameter], progress: float) -> float:
    """Average the gradients of all workers in place. Returns the first worker's progress."""
    if not distributed.is_initialized():
        return progress
    flat = torch.cat([*(p.grad.flatten() for p in parameters if p.grad is not None), torch.zeros(1)])
    flat[-1] = progress if rank() == 0 else 0.0
    distributed.all_reduce(flat)
    offset = 0
    for parameter in parameters:
        if parameter.grad is not None:
            size = parameter.grad.numel()
            parameter.grad.copy_(flat[offset : offset + size].view_as(parameter.grad))
            parameter.grad.div_(distributed.get_world_size())
            offset += size
    return float(flat[-1])


def train(
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    loss_of: Callable[[Any], Tensor],
    batches: Iterator[Any],
    budget: Budget,
    directory: Path,
    on_checkpoint: Callable[[], None] | None = None,
) -> float:
    """Train until the budget is used. Returns the mean loss of the last steps.

    The state goes to `directory`/state.pt every two minutes. A run that finds one resumes it: it skips the batches
    that were used, so that the data stay the same. Every 20 steps, one line of JSON goes to `directory`/log.jsonl.
    """
    directory.mkdir(parents=True, exist_ok=True)
    state_file = directory / "state.pt"
    step, spent = 0, 0.0
    recent: list[float] = []
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        module.load_state_dict(state["module"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, spent = state["step"], state["seconds"]
        for _ in range(step):
            next(batches)
    base = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    if state_file.exists():
        base = state["base"]
    began = saved_at = time.monotonic()
    parameters = list(module.parameters())
    while True:
        loss = loss_of(next(batches))
        loss.backward()
        progress = agree(parameters, budget.progress(step, spent + time.monotonic() - began))
        if progress >= 1:
            return sum(recent) / max(1, len(recent))
        factor = schedule(progress)
        for optimizer, rates in zip(optimizers, base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        recent = [*recent[-99:], loss.item()]
        now = time.monotonic()
        if rank():
            continue
        if step % 20 == 0:
            line = {
                "step": step,
                "seconds": round(spent + now - began),
                "loss": round(sum(recent[-20:]) / len(recent[-20:]), 4),
            }
            with (directory / "log.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
        if now - saved_at > 120:
            saved_at = now
            torch.save(
                {
                    "module": module.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "step": step,
                    "seconds": spent + now - began,
                    "base": base,
                },
                state_file,
            )
            if on_checkpoint is not None:
                on_checkpoint()
