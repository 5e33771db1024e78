"""How many tokens a round drafts and verifies."""
