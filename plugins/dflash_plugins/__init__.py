"""Kernels in the Triton language, their launches, and their plugins for TensorRT.

`kernels/` holds only the kernels: nothing of PyTorch, TensorRT or a server. `kernel_specs.py` gives the sizes that each
is compiled for, and `kernel_table.py` describes those that torch and plans both launch. `compiler.py` compiles them to
PTX without a GPU; `compiled.py` keeps them in a bundle and launches them through the driver. `launch.py`, `layers.py`
and `packed.py` launch them on torch tensors. `dialect.py` writes graphs that call the plugins of `plugins.py`.
Importing this package imports none of triton, torch and tensorrt.
"""
