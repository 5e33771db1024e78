"""The one place of the version, which holds for a checkout that is not installed, too."""

__version__ = "0.1.0"
