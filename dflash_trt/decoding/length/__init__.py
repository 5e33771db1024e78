"""The number of tokens that a round drafts and verifies."""
