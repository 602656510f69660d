"""The one exception that users are meant to see."""

from __future__ import annotations

from collections.abc import Iterable


class WeftError(Exception):
    """Bad input, reported in one sentence that names the culprit and the remedy.

    The command line prints the message and exits with status 2; any other exception is a bug in weft.
    """


def unknown_name_error(kind: str, name: str, known: Iterable[str], otherwise: str) -> WeftError:
    """Return the error for the `kind` (a noun such as "op") called `name`, which is not in `known`.

    The message suggests similar names, else ends with `otherwise`; before "see …" it lists `known` if at most 8.
    """
    import difflib

    names = list(known)
    near = " or ".join(difflib.get_close_matches(name, names, 3, 0.7))
    few = f"it is one of {', '.join(names)}: " if len(names) < 9 and otherwise.startswith("see") else ""
    return WeftError(f"unknown {kind} {name!r}; {f'did you mean {near}?' if near else few + otherwise}")
