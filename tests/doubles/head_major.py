"""Runs a graph whose caches are [B, N, C, d], as TensorRT's are, on ONNX Runtime: caches are copied in and out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.doubles.sessions import session


class HeadMajorEngine:
    """`run` is that of `OnnxRuntimeRunner`; the graph's capacity is a number. Layers with a window keep all rows."""

    def __init__(self, path: Path, *, slots: int) -> None:
        self.session = session(path)
        self.caches = {
            i.name: np.zeros((slots, *i.shape[1:]), np.float16 if "16" in i.type else np.float32)
            for i in self.session.get_inputs()
            if "_cache." in i.name
        }
        self.bases = [i.name for i in self.session.get_inputs() if i.name.startswith("base.")]

    def run(self, feeds: Mapping[str, np.ndarray], *, first_slot: int = 0) -> dict[str, np.ndarray]:
        used = slice(first_slot, first_slot + len(feeds["start"]))
        bases = {name: np.zeros(len(feeds["start"]), np.int64) for name in self.bases}
        caches = {name: cache[used] for name, cache in self.caches.items()}
        found = self.session.run(None, {**feeds, **bases, **caches})
        out = dict(zip((o.name for o in self.session.get_outputs()), found, strict=True))
        for name, cache in self.caches.items():
            cache[used] = out.pop(name.replace("_cache.", "_cache_out."))
        return out
