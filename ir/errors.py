"""The one exception that users are meant to see."""

from __future__ import annotations

from collections.abc import Iterable


class WeftError(Exception):
    """Bad input, told in one sentence that names the culprit and what would help.

    The command line prints the message and exits with status 2; any other exception is a bug in weft.
    """


def unknown(kind: str, name: str, known: Iterable[str], otherwise: str) -> WeftError:
    """Return an error about a `name` that is not `known`: it suggests the nearest, or says `otherwise`."""
    import difflib

    names = list(known)
    near = " or ".join(difflib.get_close_matches(name, names, 3, 0.7))
    few = f"it is one of {', '.join(names)}: " if len(names) < 9 and otherwise.startswith("see") else ""
    return WeftError(f"unknown {kind} {name!r}; {f'did you mean {near}?' if near else few + otherwise}")
