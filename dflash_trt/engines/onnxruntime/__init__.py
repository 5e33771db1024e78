"""ONNX Runtime, on a CPU."""
