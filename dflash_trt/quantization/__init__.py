"""Quantize checkpoints, with scales from the weights alone."""
