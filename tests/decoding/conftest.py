"""A bundle for the tests of requests."""

from tests.doubles.bundles import bundle

__all__ = ["bundle"]
