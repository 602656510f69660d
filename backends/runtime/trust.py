"""The one rule of what is code: reading a folder runs nothing.

Architecture files and the Python of folders compiled for PyTorch are code. An architecture file runs when it is named
as a source. What a folder's manifest says (that it holds Python, or which architecture file it was compiled from) is
the word of whoever wrote the folder: such code runs only with `--trust`, in Python `trust=True`.
"""

from __future__ import annotations

from weft.ir.errors import WeftError


def require_trust(trust: bool, code: str) -> None:
    """Check that the user trusts `code`, a clause that says what would run.

    Raises:
        WeftError: if not.
    """
    if not trust:
        raise WeftError(f"{code}; if you trust whoever wrote it, add --trust (in Python trust=True)")
