"""Training of the shipped pairs."""
