"""Prompts that the toy pairs are trained on."""

from __future__ import annotations


def entries(text: str) -> list[str]:
    """A list that is written as text: its entries, separated by semicolons."""
    return [entry for entry in (part.strip() for part in text.replace("\n", " ").split(";")) if entry]
