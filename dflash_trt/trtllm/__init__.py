"""TensorRT-LLM as an engine: a bundle for its PyTorch runtime, and the driver that runs one behind `LLM`."""
