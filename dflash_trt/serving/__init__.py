"""Triton Inference Server: a model repository for a bundle, the engine process behind it, the server's launch."""
