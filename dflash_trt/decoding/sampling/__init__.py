"""From logits to the token of a request: penalties, cuts, and noise that depends on nothing but seed and position."""
