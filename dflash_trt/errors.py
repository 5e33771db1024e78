"""Every error this package raises on purpose: one line that names the value, the place and the next step."""

from __future__ import annotations


class DFlashError(Exception):
    """Base of all errors meant for the user; the command line prints them without a traceback."""


class CheckpointError(DFlashError):
    """A checkpoint on disk is missing, malformed or of a kind that is not supported."""


class PairError(DFlashError):
    """A target and a drafter that do not belong together; the message names both values that disagree."""


class BuildError(DFlashError):
    """A build cannot be done as asked."""


class BundleError(DFlashError):
    """A bundle is incomplete, altered, of another format version, or its graphs disagree."""


class RequestError(DFlashError):
    """A request asks for something impossible; the message names the field."""


class BusyError(RequestError):
    """Too many requests wait already; the same request may be taken later."""
