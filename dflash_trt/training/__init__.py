"""Drafters for targets of one's own: answers to learn from, training, measurement. Behind the extra `train`."""
