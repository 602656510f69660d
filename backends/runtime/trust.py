"""The rule for running code: reading a folder never runs code without the user's consent.

Architecture files and the Python of folders compiled for PyTorch are code. An architecture file runs when the user
names it as a source. A folder's manifest (that it holds Python, or which architecture file it was compiled from) is
the claim of whoever wrote the folder: such code runs only with `--trust`, in Python `trust=True`.
"""

from __future__ import annotations

from weft.ir.errors import WeftError


def require_trust(trust: bool, code: str) -> None:
    """Check that the user has consented (`trust`) to run code that the clause `code` names. Raises WeftError if `trust`
    is False; the message begins with `code`."""
    if not trust:
        raise WeftError(f"{code}; if you trust whoever wrote it, add --trust (in Python trust=True)")
