"""The parts of a pass's docstring."""

from __future__ import annotations

import pytest

from weft.ir import WeftError
from weft.passes.core.docstrings import Documentation, read_docstring


def test_docstring_has_summary_condition_source_and_example() -> None:
    found = read_docstring(
        """Fold it.

        W (g x) = (W g) x: so
        it goes.

        Second paragraph: with a colon.

        Condition: all readers are
        linear.

        Example fold{untie=true}::

            graph g {
              input %x: f32[3]

              output y = %x
            }

        Source: somebody, 2024.
        """
    )
    assert found == Documentation(
        "Fold it.",
        "W (g x) = (W g) x: so\nit goes.\n\nSecond paragraph: with a colon.",
        "all readers are\nlinear.",
        "somebody, 2024.",
        "fold{untie=true}",
        "graph g {\n  input %x: f32[3]\n\n  output y = %x\n}\n",
    )
    assert read_docstring("Only this.") == Documentation("Only this.")


def test_repeated_paragraph_is_refused() -> None:
    with pytest.raises(WeftError, match="two paragraphs Source"):
        read_docstring("A.\n\nSource: x\n\nSource: y")
