"""Names of the classes and files of a folder for transformers, derived from the name of a model."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

RESERVED_WORD = "mamba"  # `generate` passes caches to classes with this in their names as another argument
_SIZE = re.compile(r"a?\d+(\.\d+)?(x\d+(\.\d+)?)?[mbt]", re.IGNORECASE)  # 135M, 1.4b, 8x7b, a22b


def derive_class_name(name: str) -> str:
    """Return a CamelCase class name for the model `name` without its size ("smol-135M" → "Smol"); "Weft" if nothing or
    Model remains.

    RESERVED_WORD becomes Ssm. A name that begins with a digit gets the prefix Weft. A name that transformers or an
    engine uses gets the suffix Weft: without trust in the folder's code, they would load their own.
    """
    words = ".".join(w for w in re.split(r"[^A-Za-z0-9.]+", name) if not _SIZE.fullmatch(w)).split(".")
    joined = re.sub(RESERVED_WORD, "Ssm", "".join(w[:1].upper() + w[1:] for w in words), flags=re.IGNORECASE)
    if joined in ("", "Model"):  # else its base model would be called ModelModel
        return "Weft"
    joined = f"Weft{joined}" if joined[0].isdigit() else joined
    return f"{joined}Weft" if joined.lower() in _list_taken() else joined


def derive_stem(name: str) -> str:
    """Return the class name `name` in snake case: the end of file names and the model_type."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()


@cache
def _list_taken() -> frozenset[str]:
    """Return the names that transformers and engines use, in lower case without separators."""
    return frozenset(re.sub(r"#.*|[-_]", "", Path(__file__).with_name("taken_names.txt").read_text("utf-8")).split())
