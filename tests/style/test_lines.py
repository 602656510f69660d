"""No room exceeds its budget of lines, and budgets follow the rooms down."""

from __future__ import annotations

from pathlib import Path

from .lines import count_lines, read_budgets


def test_rooms_stay_within_their_budgets(root: Path) -> None:
    lines, budgets = count_lines(root), read_budgets()
    over = {room: (count, budgets.get(room, 0)) for room, count in lines.items() if count > budgets.get(room, 0)}
    assert not over, f"lines, and the budget in tests/style/lines.json: {over}"


def test_budgets_follow_rooms_down(root: Path) -> None:
    lines, budgets = count_lines(root), read_budgets()
    high = [room for room, most in budgets.items() if most - lines.get(room, 0) > max(20, most // 20)]
    assert not high, f"python -m tests.style.lines --lower: {high}"
