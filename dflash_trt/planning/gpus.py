"""The GPUs that can be planned for: memory, bandwidth and peak rates, each with its source (gpus.json)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.errors import BuildError

_TABLE = Path(__file__).with_name("gpus.json")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    memory_bytes: the amount that the device reports, if published; else the nominal GB as 10^9 bytes.
    bandwidth: bytes per second.
    dense_flops: peak by precision, without sparsity, if published.
    sources: the source of each figure, by its name in gpus.json.
    """

    name: str
    product: str
    sm: int
    memory_bytes: int
    bandwidth: float
    dense_flops: Mapping[str, float]
    gpus_per_node: int
    sources: Mapping[str, str]


def gpus() -> dict[str, Gpu]:
    """Every GPU of the table, by name."""
    found = {}
    for name, row in json.loads(_TABLE.read_text()).items():
        major, minor = row["compute_capability"].split(".")
        single = {key: row[key] for key in ("memory_gib", "bandwidth_gb_s", "gpus_per_node")}
        rates = {f"dense_tflops.{key}": value for key, value in row["dense_tflops"].items()}
        found[name] = Gpu(
            name=name,
            product=row["product"],
            sm=10 * int(major) + int(minor),
            memory_bytes=row["memory_gib"][0] << 30,
            bandwidth=row["bandwidth_gb_s"][0] * 1e9,
            dense_flops={key: value[0] * 1e12 for key, value in row["dense_tflops"].items()},
            gpus_per_node=row["gpus_per_node"][0],
            sources={key: value[1] for key, value in (single | rates).items()},
        )
    return found


def find_gpu(name: str) -> Gpu:
    """The GPU with this name. Raises BuildError, naming the GPUs of the table."""
    table = gpus()
    if name not in table:
        raise BuildError(f"--gpu is {name!r}, known GPUs: {', '.join(table)}")
    return table[name]
