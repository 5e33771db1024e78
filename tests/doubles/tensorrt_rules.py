"""What NVIDIA documents as preconditions of the TensorRT calls that the project makes, and where.

`RULES` quotes each one. The doubles of TensorRT keep them: a call that the documentation says to fail is refused, with
the sentence in the log, and a call whose behaviour is undefined raises `Undefined`. test_tensorrt_rules.py breaks each.

"NvInferRuntime.h" and "NvInfer.h" are those of TensorRT 11.1. "tensorrt_rtx" means the docstrings of the Python package
`tensorrt_rtx` 1.7.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rule(NamedTuple):
    """source: the file or package, and the method."""

    source: str
    sentence: str


class Undefined(AssertionError):
    """A call for which TensorRT promises nothing: not even an error."""


RULES = {
    # Building
    "profile order": Rule(
        "tensorrt_rtx, IOptimizationProfile.set_shape", "0 <= min[i] <= opt[i] <= max[i] for all i"
    ),
    "profile fixed": Rule(
        "tensorrt_rtx, IOptimizationProfile.set_shape",
        "if real_shape[i] != -1, then min[i] == opt[i] == max[i] == real_shape[i]",
    ),
    "profile whole": Rule(
        "tensorrt_rtx, IOptimizationProfile.set_shape",
        "This function must be called for any network input tensor that has dynamic dimensions",
    ),
    "capability": Rule(
        "tensorrt_rtx, IBuilderConfig.set_compute_capability",
        "Must be between 0 and the number of compute capabilities - 1",
    ),
    "written": Rule("tensorrt_rtx, IStreamWriter.write", ":returns: The total bytes actually be written"),
    # Contexts
    "profile index": Rule(
        "NvInferRuntime.h, setOptimizationProfileAsync",
        "The value must lie between 0 and getEngine().getNbOptimizationProfiles() - 1",
    ),
    "profile first": Rule(
        "NvInferRuntime.h, setOptimizationProfileAsync",
        "setOptimizationProfileAsync() must be called before calling setInputShape() for all dynamic input tensors",
    ),
    "profile stream": Rule(
        "NvInferRuntime.h, setOptimizationProfileAsync",
        "Not synchronizing the stream used at enqueue with the stream used to set optimization profile asynchronously "
        "using this API will result in undefined behavior",
    ),
    "memory aligned": Rule(
        "tensorrt_rtx, IExecutionContext.set_device_memory", "256-byte aligned device memory"
    ),
    "memory size": Rule(
        "tensorrt_rtx, IExecutionContext.set_device_memory",
        "This must be at least as large as CudaEngine.get_device_memory_size_v2",
    ),
    "memory in parallel": Rule(
        "NvInferRuntime.h, setDeviceMemoryV2",
        "Releasing or otherwise using the memory for other purposes, including using it in another execution context "
        "running in parallel, during this time will result in undefined behavior",
    ),
    # Shapes
    "shape name": Rule(
        "NvInferRuntime.h, setInputShape", "false if the provided name does not map to an input tensor"
    ),
    "shape fixed": Rule(
        "NvInferRuntime.h, setInputShape",
        "Each dimension must agree with the network dimension unless the latter was -1",
    ),
    "shapes known": Rule(
        "NvInferRuntime.h, inferShapes",
        "its runtime dimensions have not yet been specified via IExecutionContext::setInputShape",
    ),
    "shapes valid": Rule("NvInferRuntime.h, inferShapes", "Returns -1 if a tensor's dimensions are invalid"),
    # Addresses
    "address name": Rule(
        "NvInferRuntime.h, setTensorAddress",
        "Return false if the provided name does not map to an input or output tensor",
    ),
    "address aligned": Rule(
        "NvInferRuntime.h, setTensorAddress", "The pointer must have at least 256-byte alignment"
    ),
    "address of the device": Rule(
        "NvInferRuntime.h, setTensorAddress",
        "The pointer must point to a device buffer of sufficient size and alignment",
    ),
    "address known": Rule(
        "NvInferRuntime.h, setTensorAddress",
        "Before calling enqueueV3(), each input must have a non-null address and each output must have a non-null "
        "address or an IOutputAllocator",
    ),
    "cache in place": Rule(
        "NvInfer.h, IKVCacheUpdateLayer",
        "The output performs in-place updates on the cache tensor, so they must share the same device memory address",
    ),
    # Passes
    "stream": Rule(
        "NvInferRuntime.h, enqueueV3",
        "Using default stream may lead to performance issues due to additional cudaDeviceSynchronize() calls by "
        "TensorRT",
    ),
    "memory there": Rule(
        "NvInferRuntime.h, enqueueV3",
        "Modifying or releasing memory that has been registered for the tensors before stream synchronization",
    ),
    "capture": Rule(
        "docs.nvidia.com/deeplearning/tensorrt, Advanced Topics, CUDA Graphs",
        "Call enqueueV3() once after an input shape change to update internal state",
    ),
    "one context per graph": Rule(
        "docs.nvidia.com/deeplearning/tensorrt-rtx, Advanced Topics, CUDA Graphs",
        "best practice is to use one execution context per captured graph",
    ),
    # TensorRT-RTX
    "cache of its own": Rule(
        "tensorrt_rtx, IRuntimeCache.deserialize",
        "Returns False on an invalid/corrupt blob or an environment mismatch",
    ),
    "graph of a shape": Rule(
        "NvInferRuntime.h of TensorRT-RTX, CudaGraphStrategy::kWHOLE_GRAPH_CAPTURE",
        "For dynamic shapes inference, this strategy captures the CUDA graph after the shape-specialized kernels are "
        "compiled for a given shape",
    ),
}


def undefined(name: str, what: str) -> Undefined:
    """What to raise where a rule is broken without that TensorRT would say so."""
    rule = RULES[name]
    return Undefined(f'{what}. {rule.source}: "{rule.sentence}"')


def refused(logger: Any, severity: Any, name: str, what: str) -> bool:
    """False, as the call returns it. The log gets the sentence."""
    rule = RULES[name]
    logger.log(severity, f'{what}. {rule.source}: "{rule.sentence}"')
    return False
