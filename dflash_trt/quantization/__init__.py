"""Quantize checkpoints, with scales from the weights alone, or calibrated by Model Optimizer."""
