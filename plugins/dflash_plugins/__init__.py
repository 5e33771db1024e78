"""Kernels in the Triton language, their launches, and their registration with TensorRT.

`kernels/` holds only the kernels: nothing of PyTorch, TensorRT or a server. `kernel_specs.py` gives the sizes that each
is compiled for. `compiler.py` compiles them to PTX without a GPU, and `compiled.py` keeps them in a bundle.
`launch.py`, `layers.py` and `packed.py` launch them on torch tensors, through `driver.py` where Triton may be missing.
`dialect.py` writes graphs with the plugins of `plugin_table.py`, which `registration.py` and `rtx.py` register.
Importing this package imports none of triton, torch and tensorrt.
"""
