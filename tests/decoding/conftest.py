"""A bundle for the tests of requests, and what runs commands."""

from tests.doubles.bundles import bundle
from tests.doubles.commands import command

__all__ = ["bundle", "command"]
