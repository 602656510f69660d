"""The lines of every room, with a budget that only falls.

`python -m tests.style.lines` prints rooms, lines and budgets, and the total; `--lower` lowers the budgets in
``lines.json`` to the lines there are. A change that needs more lines in a room says so by editing ``lines.json``.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from ..house import House

BUDGETS = Path(__file__).with_name("lines.json")


def count_lines(root: Path) -> Counter[str]:
    """Return the number of lines of Python in each room, without those of the rooms inside it."""
    lines: Counter[str] = Counter()
    for path in House(root).paths.values():
        lines[path.parent.relative_to(root).as_posix()] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def read_budgets() -> dict[str, int]:
    """Return the largest number of lines of each room."""
    budgets: dict[str, int] = json.loads(BUDGETS.read_text(encoding="utf-8"))
    return budgets


def main() -> None:
    """Print the table, or lower the budgets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lower", action="store_true", help="set budgets to the lines there are, where that is less")
    lines, lower = count_lines(Path.cwd()), parser.parse_args().lower
    budgets = read_budgets() if BUDGETS.exists() else lines
    if lower:
        budgets = {room: min(count, budgets.get(room, count)) for room, count in lines.items()}
        BUDGETS.write_text(json.dumps(budgets, indent=0) + "\n", encoding="utf-8")
    for room, count in lines.items():
        print(f"{room:48} {count:7,} of {budgets.get(room, 0):7,}")
    print(f"{'all':48} {lines.total():7,} of {sum(budgets.values()):7,}")


if __name__ == "__main__":
    main()
