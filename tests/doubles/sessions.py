"""Graphs on ONNX Runtime alone: sessions with one thread, nodes that they executed, and caches as TensorRT has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort


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


def session(model: Path | bytes | ir.Model | onnx.ModelProto, **options: Any) -> ort.InferenceSession:
    """A session of a graph, which may lie in a file. `options`: attributes of SessionOptions."""
    settings = ort.SessionOptions()
    for name, value in {"intra_op_num_threads": 1, "log_severity_level": 3, **options}.items():
        setattr(settings, name, value)
    if isinstance(model, ir.Model):
        model = ir.to_proto(model)
    if isinstance(model, onnx.ModelProto):
        model = model.SerializeToString()
    source = str(model) if isinstance(model, Path) else model
    return ort.InferenceSession(source, settings, providers=["CPUExecutionProvider"])


def executed(run: ort.InferenceSession) -> list[dict[str, Any]]:
    """The profile's events of executed nodes. Ends the profile."""
    events = json.loads(Path(run.end_profiling()).read_text())
    return [event for event in events if event["cat"] == "Node" and event["name"].endswith("_kernel_time")]
