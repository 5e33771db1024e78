"""Engines: named buffers in, named buffers out, caches updated in place."""
