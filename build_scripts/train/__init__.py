"""Training of the targets of the shipped pairs."""
