"""Decoding on the host: sampling, acceptance, stop conditions, text and statistics, and the decoding loop."""
