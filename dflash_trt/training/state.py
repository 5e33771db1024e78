"""The state of a run, for resuming it: weights and optimizer in safetensors, the rest in JSON. No pickle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from dflash_trt.errors import DFlashError

_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SEPARATOR = "|"


def write_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that others may read as any new file; the library gives it to its owner alone."""
    file.touch()
    mode = file.stat().st_mode
    save_file(dict(tensors), file, metadata)
    file.chmod(mode & 0o777)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` when it is complete."""
    work, old = (folder.with_name(f".{folder.name}.{end}") for end in ("part", "old"))
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    yield work
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    work.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def save_state(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, write: bool
) -> None:
    """Save the state after `step` steps. All processes call this; only the one with `write` writes."""
    weights, state = get_state_dict(module, optimizer, options=_OPTIONS)
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
        (work / "state.json").write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")


def load_state(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the last complete state. Returns the number of finished steps, 0 without a state.

    Raises DFlashError if the state belongs to another model or optimizer.
    """
    # A kill between two renames leaves only the old one.
    places = (folder, folder.with_name(f".{folder.name}.old"))
    place = next((each for each in places if (each / "state.json").exists()), None)
    if place is None:
        return 0
    step = json.loads((place / "state.json").read_text(encoding="utf-8"))["step"]
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
    _, made = get_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))
    if {n: set(v) for n, v in made["state"].items()} != {n: set(v) for n, v in state.items()}:  # type: ignore[arg-type]
        raise DFlashError(f"{place}: belongs to another drafter or optimizer; choose another --out")
    held: dict[str, Any] = {"state": state, "param_groups": made["param_groups"]}
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=held, options=_OPTIONS)
    return int(step)
