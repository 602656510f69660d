"""Tensors tile a checkpoint file: consecutive, aligned, inside the file."""

from __future__ import annotations

import pytest

from weft.frontends.formats.tiling import check_tiling
from weft.ir import WeftError


def test_consecutive_tensors_in_any_order_are_accepted() -> None:
    check_tiling("f", {"b": (12, 20), "a": (8, 12)}, 8, 20)
    check_tiling("f", {"a": (32, 37), "b": (64, 70)}, 30, 70, align=32)
    check_tiling("f", {}, 8, 8)


@pytest.mark.parametrize(
    ("extents", "size", "message"),
    [
        ({"a": (8, 12), "b": (10, 20)}, 20, "f is damaged: tensor 'b' at byte 10 overlaps tensor 'a'; fetch it again"),
        ({"a": (9, 12)}, 12, "f is damaged: tensor 'a' at byte 9 leaves 1 unused byte after the header"),
        ({"a": (8, 12), "b": (12, 20)}, 19, "f is truncated: its tensors end at byte 20, the file at 19"),
    ],
)
def test_faults_name_the_tensor_and_the_byte(extents: dict[str, tuple[int, int]], size: int, message: str) -> None:
    with pytest.raises(WeftError) as e:
        check_tiling("f", extents, 8, size)
    assert str(e.value).startswith(message)
