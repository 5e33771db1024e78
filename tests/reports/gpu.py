"""A machine with one GPU: the doubles of CUDA and TensorRT."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dflash_trt import hardware
from dflash_trt.engines.tensorrt import opening, plans
from dflash_trt.engines.tensorrt.device_arrays import DeviceArrays
from tests.doubles import fake_tensorrt
from tests.doubles.cuda_double import Cuda, deferred


@contextmanager
def one_gpu(capability: int = 90) -> Iterator[pytest.MonkeyPatch]:
    """A GPU of this compute capability. The host samples, because Triton's interpreter is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt", fake_tensorrt)
        for module in (hardware, plans):
            patch.setattr(module, "compute_capabilities", lambda: [capability])
        patch.setattr(Cuda, "get_device_capability", staticmethod(lambda: divmod(capability, 10)))
        patch.setattr(torch, "cuda", Cuda)
        patch.setattr(opening, "warm_up", lambda *_, **__: 0)
        on_host = property(lambda self: False, lambda self, value: None)
        patch.setattr(DeviceArrays, "samples", on_host, raising=False)
        with deferred():
            yield patch
