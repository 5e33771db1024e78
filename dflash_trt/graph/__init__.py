"""Build ONNX graphs: a thin builder over onnx_ir, and the `dflash::` operators as ONNX functions."""

MICROSOFT_DOMAIN = "com.microsoft"
INTEGERS = 4  # MatMulNBits's accuracy_level: inputs in eight bits
