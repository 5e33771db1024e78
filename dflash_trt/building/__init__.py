"""Build a bundle from checkpoints."""
