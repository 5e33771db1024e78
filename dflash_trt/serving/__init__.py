"""Serving with Triton Inference Server: a bundle's model repository, its engine process, and the server's launch."""
