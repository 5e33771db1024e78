"""Writing ONNX graphs: a thin builder over onnx_ir and the `dflash::` function libraries."""
