"""Kernels in the Triton language, what launches them, and their registration with TensorRT.

`kernels/` holds the kernels and nothing of PyTorch, TensorRT or a server; `reference.py` the same operators in NumPy;
`launch.py` and `moe.py` launch them on torch tensors; `compiler.py` compiles them to PTX without a GPU;
`kernel_specs.py` says which kernel with which arguments makes each TensorRT plugin, and `registration.py` registers
those. Importing this package imports none of triton, torch and tensorrt.
"""
