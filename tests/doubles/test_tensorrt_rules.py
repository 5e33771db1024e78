"""Every documented precondition that the doubles of TensorRT keep is broken here once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from tests.doubles import fake_tensorrt as trt
from tests.doubles import fake_tensorrt_rtx as rtx
from tests.doubles.cuda_double import Cuda, deferred
from tests.doubles.tensorrt_rules import RULES, Undefined


class Log(trt.ILogger):
    def __init__(self) -> None:
        self.said: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        self.said.append(message)


class Case:
    """A plan `y = x + 1` with a cache that a pass updates, and a context with all that a pass needs."""

    def __init__(self, folder: Path) -> None:
        self.log, self.folder = Log(), folder
        self.stream, self.other = Cuda.Stream(), Cuda.Stream()
        self.memory = self.zeros(1 << 13, torch.uint8)
        engine = trt.Runtime(self.log).deserialize_cuda_engine(self.plan())
        assert engine is not None
        self.context = engine.create_execution_context("USER_MANAGED")
        self.context.set_optimization_profile_async(0, self.stream.cuda_stream)
        self.context.set_device_memory(self.memory.data_ptr(), 4096)
        self.buffers = {"x": self.zeros(64), "k_cache.0": self.zeros(1 << 12), "y": self.zeros(64)}
        self.buffers |= {
            "k_cache_out.0": self.buffers["k_cache.0"],
            "rows": self.zeros(64),
            "at": self.zeros(8, torch.int64),
        }
        self.shape(3)
        for name, buffer in self.buffers.items():
            assert self.context.set_tensor_address(name, buffer.data_ptr())
        Cuda.synchronize()  # the memory is zero

    def zeros(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device="cuda")

    def shape(self, length: int) -> None:
        shapes = {"x": (length,), "rows": (1, 2, length, 4), "k_cache.0": (1, 2, 16, 4), "at": (1,)}
        for name, shape in shapes.items():
            assert self.context.set_input_shape(name, shape)

    def run(self, stream: Any = None) -> bool:
        return self.context.execute_async_v3((stream or self.stream).cuda_stream)

    def model(self) -> onnx.ModelProto:
        def value(name: str, dtype: int, shape: list[str | int]) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, dtype, shape)

        float32 = TensorProto.FLOAT
        graph = helper.make_graph(
            [
                helper.make_node("Add", ["x", "one"], ["y"]),
                helper.make_node("TensorScatter", ["k_cache.0", "rows", "at"], ["k_cache_out.0"], axis=-2),
            ],
            "plan",
            [
                value("x", float32, ["S"]),
                value("k_cache.0", float32, ["B", 2, 16, 4]),
                value("rows", float32, ["B", 2, "S", 4]),
                value("at", TensorProto.INT64, ["B"]),
            ],
            [value("y", float32, ["S"]), value("k_cache_out.0", float32, ["B", 2, 16, 4])],
            [onnx.numpy_helper.from_array(np.ones(1, np.float32), "one")],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)

    def plan(self, *, cache: int = 16, without: str = "", writer: Any = None) -> bytes:
        """The plan as it is written; empty if the builder refuses."""
        file = self.folder / "plan.onnx"
        onnx.save(self.model(), file)
        builder = trt.Builder(self.log)
        network, config, profile = builder.create_network(0), builder.create_builder_config(), trt.Profile()
        assert trt.OnnxParser(network, self.log).parse_from_file(str(file))
        shapes: dict[str, list[tuple[int, ...]]] = {
            "x": [(1,), (3,), (8,)],
            "rows": [(1, 2, 1, 4), (1, 2, 3, 4), (1, 2, 8, 4)],
            "k_cache.0": [(1, 2, cache, 4)] * 3,
            "at": [(1,)] * 3,
        }
        for name, each in shapes.items():
            if name != without:
                profile.set_shape(name, *each)
        assert config.add_optimization_profile(profile) == 0
        config.progress_monitor = Monitor()
        written = writer or Writer()
        return written.plan if builder.build_serialized_network_to_stream(network, config, written) else b""


class Monitor(trt.IProgressMonitor):
    def phase_start(self, name: str, parent: str, steps: int) -> None: ...

    def step_complete(self, name: str, done: int) -> bool:
        return True

    def phase_finish(self, name: str) -> None: ...


class Writer(trt.IStreamWriter):
    most = 1 << 20

    def __init__(self) -> None:
        self.plan = b""

    def write(self, data: bytes) -> int:
        self.plan += data
        return min(len(data), self.most)


class ShortWriter(Writer):
    most = 3


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setattr(torch, "cuda", Cuda)
    with deferred():
        made = Case(tmp_path)
        yield made
        for stream in (made.stream, made.other):
            stream.queue.clear()


def test_a_pass_that_keeps_the_rules_runs(case: Case) -> None:
    with torch.cuda.stream(case.stream):
        case.buffers["x"].fill_(2)
        case.buffers["rows"].fill_(5)
    assert case.run()
    case.stream.synchronize()
    assert case.buffers["y"][:4].cpu().tolist() == [3, 3, 3, 0]
    assert case.buffers["k_cache.0"][:13].cpu().tolist() == [5.0] * 12 + [0.0]
    assert not case.log.said


# The calls that return False, or raise what the Python package raises, and say why.
REFUSED: dict[str, Callable[[Case], object]] = {
    "profile whole": lambda c: c.plan(without="rows"),
    "profile fixed": lambda c: c.plan(cache=32),
    "written": lambda c: c.plan(writer=ShortWriter()),
    "profile index": lambda c: c.context.set_optimization_profile_async(1, 1),
    "shape name": lambda c: c.context.set_input_shape("z", (1,)),
    "shape fixed": lambda c: c.context.set_input_shape("k_cache.0", (1, 2, 15, 4)),
    "shapes known": lambda c: (c.context._shapes.pop("x"), c.run())[1],
    "address name": lambda c: c.context.set_tensor_address("z", c.memory.data_ptr()),
    "address aligned": lambda c: c.context.set_tensor_address("x", c.buffers["x"].data_ptr() + 128),
    "address of the device": lambda c: c.context.set_tensor_address("x", 256),
    "address known": lambda c: (c.context._addresses.pop("y"), c.run())[1],
}


@pytest.mark.parametrize("rule", REFUSED)
def test_a_call_is_refused_with_the_sentence(case: Case, rule: str) -> None:
    assert not REFUSED[rule](case)
    assert RULES[rule].sentence in case.log.said[-1]


def another_stream(case: Case) -> object:
    assert case.run()
    case.context.set_optimization_profile_async(0, case.other.cuda_stream)
    return case.run(case.other)


def released(case: Case) -> object:
    assert case.run()
    del case.buffers["x"]
    return case.stream.synchronize()


def too_small(case: Case) -> object:
    small = case.zeros(2)
    assert case.context.set_tensor_address("x", small.data_ptr())
    return case.run()


UNDEFINED: dict[str, Callable[[Case], object]] = {
    "profile first": lambda c: trt.Context(c.context._engine).set_input_shape("x", (1,)),
    "profile stream": lambda c: c.run(c.other),
    "memory aligned": lambda c: c.context.set_device_memory(c.memory.data_ptr() + 64, 8000),
    "memory size": lambda c: c.context.set_device_memory(c.memory.data_ptr(), 4095),
    "memory in parallel": another_stream, "address of the device": too_small,
    "cache in place": lambda c: (c.context.set_tensor_address("k_cache_out.0", c.zeros(1 << 12).data_ptr()), c.run()),
    "stream": lambda c: c.run(Cuda.default), "memory there": released,
}  # fmt: skip


@pytest.mark.parametrize("rule", UNDEFINED)
def test_what_is_undefined_raises(case: Case, rule: str) -> None:
    with pytest.raises(Undefined) as caught:
        UNDEFINED[rule](case)
    assert RULES[rule].sentence in str(caught.value)


def test_shapes_that_contradict_each_other_raise(case: Case) -> None:
    assert case.context.set_input_shape("x", (4,))
    with pytest.raises(RuntimeError, match=r"S is \[3, 4\]"):
        case.context.infer_shapes()
    assert RULES["shapes valid"].sentence in case.log.said[-1]


def test_lengths_of_a_profile_are_in_order() -> None:
    with pytest.raises(ValueError, match="min"):
        trt.Profile().set_shape("x", (2,), (1,), (3,))
    assert trt.Config().add_optimization_profile(trt.Profile()) == -1
    config = rtx.Config()
    config.num_compute_capabilities = 1
    assert config.set_compute_capability("SM89", 0)
    assert not config.set_compute_capability("SM120", 1)


def test_a_capture_follows_a_pass_of_its_shapes(case: Case) -> None:
    assert case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(case.stream):
        case.shape(5)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            assert not case.run()
        finally:
            graph.capture_end()
    assert RULES["capture"].sentence in case.log.said[-1]


def test_the_context_of_a_graph_runs_no_other_shapes(case: Case) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(case.stream):
        assert case.run()
        graph.capture_begin(capture_error_mode="thread_local")
        assert case.run()
        graph.capture_end()
        graph.replay()
        case.stream.synchronize()
        case.shape(5)
        assert case.run()
        case.shape(3)
        graph.replay()
        with pytest.raises(Undefined, match=RULES["one context per graph"].sentence):
            case.stream.synchronize()


def test_each_rule_is_broken_by_a_test() -> None:
    elsewhere = {"profile order", "capability", "shapes valid", "capture", "one context per graph"}  # above
    of_rtx = {"cache of its own", "graph of a shape"}  # test_warm_up.py
    assert {*REFUSED, *UNDEFINED} | elsewhere | of_rtx == {*RULES}
