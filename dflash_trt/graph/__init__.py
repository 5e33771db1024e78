"""Build ONNX graphs: a thin builder over onnx_ir, and the `dflash::` operators as ONNX functions."""
