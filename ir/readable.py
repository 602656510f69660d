"""Formatting for terminals: counts and bytes with units, and strings without control characters."""

from __future__ import annotations

import unicodedata


def format_count(number: int) -> str:
    """Format `number` with a decimal unit (k, M, G, T): 1234567 as 1.23 M; below 1000 as it is."""
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{(number + size // 2) // size:,} {unit}"
    return str(number)


def format_bytes(number: float) -> str:
    """Format a `number` of bytes with a binary unit (B, KiB, MiB, GiB): 1536 as 1.5 KiB."""
    number = min(number, 1e300)  # dividing a larger int overflows
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"


def escape_controls(text: str, keep: str = "\n\t") -> str:
    """Return `text` with controls, line separators and directional marks escaped (``\\u001b``), except those in `keep`.

    Text of files and models is untrusted: control characters can move the cursor, set the title or make the terminal
    send input; directional embeddings and isolates (UAX #9) can show a name backwards. Escaped JSON keeps its meaning.
    """
    if text.isprintable():
        return text
    return "".join(c if c in keep or not _is_control(c) else f"\\u{ord(c):04x}" for c in text)


def _is_control(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(c) in _DIRECTIONS


_DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
