"""The engine that runs the graphs by torch: on an NVIDIA GPU, or on a CPU (docs/torch.md)."""
