"""Kernels in the Triton language, their launches, and their registration with TensorRT.

`kernels/` holds only the kernels: nothing of PyTorch, TensorRT or a server. `reference.py` has the same operators in
NumPy. `kernel_specs.py` gives the sizes that each is compiled for. `compiler.py` compiles them to PTX without a GPU,
and `compiled.py` keeps them in a bundle. `launch.py`, `rounds.py`, `attention.py` and `moe.py` launch them on torch
tensors, through `driver.py` where Triton may be missing. `registration.py` and `rtx.py` make plugins of them, those of
`plugin_table.py`. Importing this package imports none of triton, torch and tensorrt.
"""
