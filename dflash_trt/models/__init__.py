"""The graphs of targets, one file per family, and of drafters."""
