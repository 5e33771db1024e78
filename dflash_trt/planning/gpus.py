"""The GPUs that can be planned for, with the source of each figure (gpus.json)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_trt import hardware
from dflash_trt.errors import UsageError, did_you_mean, show

_TABLE = Path(__file__).with_name("gpus.json")
_FIGURES = ("memory", "sm")  # the figures of a GPU that the table lacks


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    memory_bytes: all memory, as nvidia-smi shows it.
    sm: its compute capability, 89 for 8.9.
    sources: the source of each figure, by its name in gpus.json.
    """

    name: str
    product: str
    sm: int
    memory_bytes: int
    gpus_per_node: int
    sources: Mapping[str, str]


def gpus() -> dict[str, Gpu]:
    by_name = {}
    for name, row in json.loads(_TABLE.read_text(encoding="utf-8")).items():
        major, minor = row["compute_capability"].split(".")
        (mib, memory_source), (per_node, node_source) = row["memory_mib"], row["gpus_per_node"]
        by_name[name] = Gpu(
            name=name,
            product=row["product"],
            sm=10 * int(major) + int(minor),
            memory_bytes=mib << 20,
            gpus_per_node=per_node,
            sources={"memory_mib": memory_source, "gpus_per_node": node_source},
        )
    return by_name


def find_gpu(name: str) -> Gpu:
    """The GPU with this name, or one by its figures: `memory=24,sm=89` (GiB, compute capability).

    Case, blanks and the words NVIDIA and GeForce do not matter: "NVIDIA GeForce RTX 4090" is rtx-4090.

    Raises BuildError, naming the GPUs of the table.
    """
    if "=" in name:
        return _by_figures(name)
    table = gpus()
    short = {_letters(known): known for known in table}
    wanted = _letters(name)
    if wanted not in short:
        raise UsageError(
            f"--gpu is {name!r}{did_you_mean(wanted, short.keys(), short)}; known GPUs: {', '.join(table)}; "
            "or give the figures of yours: --gpu memory=24,sm=89 (GiB, compute capability)"
        )
    return table[short[wanted]]


def gpu_here() -> Gpu | None:
    """The first GPU here, by what nvidia-smi says; None if there is none, or it shares the memory of the host."""
    here = hardware.gpus()
    gpu = here[0] if here else {}
    mib, capability = (gpu.get(name, "").partition(" ")[0] for name in ("memory.total", "compute_cap"))
    if not mib.isdigit() or not capability.replace(".", "").isdigit():
        return None
    sources = dict.fromkeys(("memory_mib", "gpus_per_node"), "nvidia-smi")
    sm, count = int(capability.replace(".", "")), len(here)
    return Gpu(gpu["name"], gpu["name"], sm, int(mib) << 20, count, sources)


def _letters(name: str) -> str:
    """A name in small letters and digits, without the maker's names."""
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())


def _by_figures(text: str) -> Gpu:
    def wrong(problem: str) -> UsageError:
        return UsageError(
            f"--gpu is {show(text)}: {problem}; "
            "expected memory=GIB,sm=COMPUTE_CAPABILITY, such as memory=24,sm=89"
        )

    figures: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in _FIGURES or key in figures:
            raise wrong(f"{key!r} is unknown or given twice")
        try:
            figures[key] = float(value)
        except ValueError:
            raise wrong(f"{key} is {value!r}, not a number") from None
        if not 0 < figures[key] < 1e6:
            raise wrong(f"{key} is {value}, expected a number above 0")
    if missing := [key for key in _FIGURES if key not in figures]:
        raise wrong(f"{missing[0]} is missing")
    sm = figures["sm"] if figures["sm"] >= 20 else figures["sm"] * 10  # 8.9 is 89
    if sm not in range(50, 200):
        raise wrong(f"sm is {figures['sm']:g}, expected a compute capability")
    return Gpu(
        name="custom",
        product="a GPU by its figures",
        sm=int(sm),
        memory_bytes=int(figures["memory"] * 2**30),
        gpus_per_node=1,
        sources=dict.fromkeys(("memory_mib", "gpus_per_node"), "as given with --gpu"),
    )
