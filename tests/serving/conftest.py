"""A bundle for the tests of this folder."""

from tests.doubles.bundles import bundle

__all__ = ["bundle"]
