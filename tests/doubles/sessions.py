"""Graphs on ONNX Runtime alone: a session with one thread, and the nodes that it executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort


def session(model: Path | bytes | ir.Model | onnx.ModelProto, **options: Any) -> ort.InferenceSession:
    """A session of a graph, which may lie in a file. `options`: attributes of SessionOptions."""
    settings = ort.SessionOptions()
    for name, value in {"intra_op_num_threads": 1, "log_severity_level": 3, **options}.items():
        setattr(settings, name, value)
    if isinstance(model, ir.Model):
        model = ir.to_proto(model)
    if isinstance(model, onnx.ModelProto):
        model = model.SerializeToString()
    given = str(model) if isinstance(model, Path) else model
    return ort.InferenceSession(given, settings, providers=["CPUExecutionProvider"])


def executed(run: ort.InferenceSession) -> list[dict[str, Any]]:
    """The profile's events of executed nodes. Ends the profile."""
    events = json.loads(Path(run.end_profiling()).read_text())
    return [event for event in events if event["cat"] == "Node" and event["name"].endswith("_kernel_time")]
