"""Engines: named buffers in, named buffers out, caches kept in place."""
