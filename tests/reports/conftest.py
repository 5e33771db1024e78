"""Runs commands."""

from tests.doubles.commands import command

__all__ = ["command"]
