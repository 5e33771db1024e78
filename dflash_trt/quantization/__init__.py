"""Quantize checkpoints, with scales from the weights alone or from a calibration set."""
