"""The kernels. Arguments are in the order in which TensorRT passes them: inputs, integers, outputs, constants."""
