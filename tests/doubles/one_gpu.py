"""A machine with one GPU: the doubles of CUDA, TensorRT and TensorRT-RTX."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir
import pytest
import torch
from dflash_plugins.dialect import TensorRTLayerPlugins

from dflash_trt import hardware
from dflash_trt.checkpoint.schema import LayerDeltaNet
from dflash_trt.engines.device.arrays import DeviceArrays
from dflash_trt.engines.tensorrt import builder, opening, plans
from dflash_trt.graph.builder import GraphBuilder
from dflash_trt.graph.delta_net import onnxruntime_delta
from dflash_trt.graph.experts import widened_blocks
from tests.doubles import fake_tensorrt, fake_tensorrt_rtx
from tests.doubles.cuda_double import Cuda, deferred


class Bodies(TensorRTLayerPlugins):
    """Standard operators in place of plugins, as the double of TensorRT runs no kernels."""

    def mxfp4_experts(self, g: GraphBuilder, blocks: ir.Value, scales: ir.Value) -> tuple[ir.Value, None]:
        return widened_blocks(g, blocks, scales, resident=True), None

    def gated_delta_net(self, kind: LayerDeltaNet) -> ir.Function:
        return onnxruntime_delta(kind)


@contextmanager
def one_gpu(
    capability: int = 90, *, warm_up: bool = False, on_host: bool = True
) -> Iterator[pytest.MonkeyPatch]:
    """A GPU of this compute capability, TensorRT and TensorRT-RTX.

    warm_up: whether opening runs passes of every size. on_host: whether the host samples, because Triton's interpreter
    is slow.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt", fake_tensorrt)
        patch.setitem(sys.modules, "tensorrt_rtx", fake_tensorrt_rtx)
        for module in (hardware, plans):
            patch.setattr(module, "compute_capabilities", lambda: [capability])
        patch.setattr(Cuda, "capability", divmod(capability, 10))
        patch.setattr(torch, "cuda", Cuda)
        patch.setattr(plans, "TensorRTLayerPlugins", Bodies)
        for module, name in ((builder, "register"), (opening.plugins, "register")):
            patch.setattr(module, name, lambda *_: None)
        if not warm_up:
            patch.setattr(opening, "warm_up", lambda *_, **__: 0)
        if on_host:
            never = property(lambda self: False, lambda self, value: None)
            patch.setattr(DeviceArrays, "samples", never, raising=False)
        with deferred():
            yield patch
