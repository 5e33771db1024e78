"""The kernels. Arguments are in TensorRT's order: inputs, integers, outputs, constants."""
