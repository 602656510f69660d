"""Chains of additions: their ends, their summands, and the removal of one."""

from __future__ import annotations

import pytest

from weft.ir import Graph, parse
from weft.passes.edits.sums import find_summands, find_sums, has_add_norm_reader, remove_summand

HEAD = "graph g { input %x: f32[n, 4] input %y: f32[n, 4] input %z: f32[n, 4] param %b: f32[4] = full(1.0, dims=[4]) "


def graph(body: str) -> Graph:
    return parse(f"{HEAD}{body}}}")


def names(g: Graph) -> list[list[str]]:
    return [[v.name for v in find_summands(node)] for node in find_sums(g)]


@pytest.mark.parametrize(
    ("body", "sums"),
    [
        ("%p: f32[n, 4] = add(%x, %y) %q: f32[n, 4] = add(%z, %p) output q = %q", [["z", "x", "y"]]),
        # Another reader of the inner sum: it is a sum of its own and one summand of the outer one.
        (
            "%p: f32[n, 4] = add(%x, %y) %q: f32[n, 4] = add(%z, %p) output p = %p output q = %q",
            [["x", "y"], ["z", "p"]],
        ),
        ("%p: f32[n, 4] = add(%x, %b) output p = %p", [["x"]]),  # a bias broadcasts
        (
            "%p: f32[n, 4] = add(%x, %y) %m: f32[n, 4], %s: f32[n, 4] = add_norm(%p, %z) output m = %m output s = %s",
            [["x", "y", "z"]],
        ),
        ("%p: f32[n, 4] = mul(%x, %y) output p = %p", []),
    ],
)
def test_sums_list_their_summands(body: str, sums: list[list[str]]) -> None:
    assert names(graph(body)) == sums


def test_removed_summand_leaves_the_other_operand() -> None:
    g = graph("%e: f32[n, 4] = exp(%x) %p: f32[n, 4] = add(%e, %y) %q: f32[n, 4] = add(%p, %z) output q = %q")
    e = next(n.output for n in g.nodes if n.output.name == "e")
    remove_summand(e)
    assert names(g) == [["y", "z"]] and not e.uses


def test_summand_of_add_norm_is_recognized() -> None:
    g = graph("%m: f32[n, 4], %s: f32[n, 4] = add_norm(%x, %y) %p: f32[n, 4] = add(%m, %z) output p = %p output s = %s")
    assert has_add_norm_reader(g.inputs["x"]) and not has_add_norm_reader(g.inputs["z"])
