"""From logits to the token of a request: penalties, truncation, and noise that depends only on seed and position."""
