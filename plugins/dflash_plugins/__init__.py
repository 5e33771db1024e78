"""Kernels in the Triton language, their launches, and their registration with TensorRT.

`kernels/` holds only the kernels: nothing of PyTorch, TensorRT or a server. `reference.py` has the same operators in
NumPy. `launch.py`, `attention.py` and `moe.py` launch the kernels on torch tensors. `compiler.py` compiles them to PTX
without a GPU. `kernel_specs.py` gives the kernel and arguments of each TensorRT plugin. `registration.py` registers
the plugins. Importing this package imports none of triton, torch and tensorrt.
"""
