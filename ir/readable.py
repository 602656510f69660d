"""Numbers and text as people read them: units, and nothing that steers a terminal."""

from __future__ import annotations

import unicodedata


def count(number: int) -> str:
    """1234567 as 1.23 M."""
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{(number + size // 2) // size:,} {unit}"
    return str(number)


def size(number: float) -> str:
    """Bytes, in binary units."""
    number = min(number, 1e300)  # of a size that no machine has
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"


def printable(text: str, keep: str = "\n\t") -> str:
    """Return `text` with what steers terminals or hides text spelled out, as ``\\u001b``.

    Names come from files of strangers, and answers from models: control characters move the cursor, set the title or
    answer queries; marks of direction (Unicode UAX #9) show a name backwards. JSON stays what it means.
    """
    if text.isprintable():
        return text
    return "".join(c if c in keep or not _steers(c) else f"\\u{ord(c):04x}" for c in text)


def _steers(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(c) in _DIRECTIONS


_DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
