"""TensorRT and TensorRT-RTX: plans from the graphs, and the engine that runs them (docs/tensorrt.md)."""
