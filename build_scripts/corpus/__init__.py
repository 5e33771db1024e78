"""The training text of the shipped pairs."""
