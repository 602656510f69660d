"""Messages for unknown names."""

from __future__ import annotations

import pytest

from weft.ir.errors import WeftError, unknown_name_error


@pytest.mark.parametrize(
    ("name", "known", "otherwise", "message"),
    [
        ("sofmax", ["softmax", "relu"], "see `weft ops`", "unknown op 'sofmax'; did you mean softmax?"),
        ("zzz", ["softmax", "relu"], "see `weft ops`", "unknown op 'zzz'; it is one of softmax, relu: see `weft ops`"),
        ("zzz", [f"op{i}" for i in range(9)], "see `weft ops`", "unknown op 'zzz'; see `weft ops`"),
        ("zzz", ["softmax"], "declare it", "unknown op 'zzz'; declare it"),
    ],
)
def test_unknown_name_error_suggests_or_lists_names(name: str, known: list[str], otherwise: str, message: str) -> None:
    error = unknown_name_error("op", name, known, otherwise)
    assert isinstance(error, WeftError) and str(error) == message
