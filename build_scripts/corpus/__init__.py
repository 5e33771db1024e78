"""The text that the shipped pairs are trained on."""
