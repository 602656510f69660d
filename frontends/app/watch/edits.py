"""Integers that an architecture file declares, and the file with other integers."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DeclaredNumber:
    """An integer in a file: its name (of the argument, the variable or the class), value and line, and the place of its
    bytes."""

    name: str
    value: int
    line: int
    start: int
    stop: int

    @property
    def range(self) -> list[int]:
        """Return values to compare with, ascending: up to a quarter and four times the value."""
        v = self.value
        return sorted({n for n in (v // 4, v // 2, v * 3 // 4, v, v * 3 // 2, 2 * v, 4 * v) if n > 0})


def list_numbers(code: bytes) -> list[DeclaredNumber]:
    """Return the positive integers of `code` that are values of arguments or variables, in their order in the file.
    A file with a syntax error has none."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return []
    starts = [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    numbers = dict[tuple[int, int], DeclaredNumber]()
    for name, node in _list_named(tree):
        for constant in ast.walk(node):
            if isinstance(constant, ast.Constant) and type(constant.value) is int and constant.value > 0:
                assert constant.end_lineno is not None and constant.end_col_offset is not None
                start = starts[constant.lineno - 1] + constant.col_offset
                stop = starts[constant.end_lineno - 1] + constant.end_col_offset
                numbers[start, stop] = DeclaredNumber(name, constant.value, constant.lineno, start, stop)
    return [numbers[place] for place in sorted(numbers)]


def _list_named(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, expression) for every assignment and call argument in `tree`, outer ones before inner ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield from ((called, argument) for argument in node.args)
            yield from ((keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg)


def replace_numbers(code: bytes, values: Mapping[int, int]) -> bytes:
    """Return `code` with other values for some of its `list_numbers`, by their index."""
    numbers = list_numbers(code)
    for index in sorted((i for i in values if 0 <= i < len(numbers)), reverse=True):
        code = code[: numbers[index].start] + str(values[index]).encode() + code[numbers[index].stop :]
    return code
