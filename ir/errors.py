"""The one exception that users are meant to see."""

from __future__ import annotations


class WeftError(Exception):
    """Bad input, told in one sentence that names the culprit and what would help.

    The command line prints the message and exits with status 2; any other exception is a bug in weft.
    """
