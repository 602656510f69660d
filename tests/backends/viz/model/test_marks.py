"""Marks of a comparison: common signs, counts, and keys that layers share."""

from __future__ import annotations

from weft.backends.viz.model.marks import CHANGED, KEPT, NEW, REMOVED, Change, Mark, count_signs, find_common_sign


def test_common_sign_is_changed_if_signs_differ() -> None:
    assert find_common_sign([Mark(NEW), None, Mark(NEW)]) == NEW
    assert find_common_sign([Mark(NEW), Mark(KEPT)]) == CHANGED
    assert find_common_sign([None, None]) == find_common_sign([]) == ""


def test_counts_leave_out_kept_operations() -> None:
    marks = [Mark(CHANGED), Mark(KEPT), Mark(REMOVED), None, Mark(REMOVED)]
    assert count_signs(marks) == "2 removed, 1 changed"
    assert count_signs([Mark(KEPT)]) == ""


def test_marks_are_alike_if_only_names_differ() -> None:
    def mark(layer: int, heads: str) -> Mark:
        read = Change("reads x", f"layers.{layer}.norm", f"layers.{layer}.add", named=True)
        return Mark(CHANGED, ("was 9 heads",), (Change("heads", "9", heads), read), other=f"layers.{layer}.attn")

    assert mark(0, "3").alike == mark(7, "3").alike
    assert mark(0, "3").alike != mark(0, "1").alike
    assert Mark(NEW).alike != Mark(REMOVED).alike
