"""Checkpoints on disk: configurations, tensors, and pairs of target and drafter. Needs neither torch nor
transformers.
"""
