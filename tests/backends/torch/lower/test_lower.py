"""Lowering of graphs to programs: small graphs that no model family has, compared with the interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from weft.backends.torch.lower.lower import move_into_encoder
from weft.backends.torch.program.statements import Program, Statement, Var
from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.elementwise import mask_fill
from weft.ir.recipes import Literal
from weft.ir.types import TensorType, dtypes

from ..small_graphs import F32, check, small_graph

ROWS = np.array([[1.5, -2.0, 0.25, 3.0], [0.5, 4.0, -1.0, 2.0]])
HIDDEN = np.array([[1.0, 2.0, -np.inf, 0.5], [-np.inf] * 4])


def repeated_reshape(x: Value) -> Value:
    whole = ops.reshape(ops.reshape(x, shape=(*x.shape[:1], 2, 2)), shape=x.shape)
    return ops.add(whole, ops.exp(x))


def chosen_rows(x: Value) -> Value:
    """Rows of a table, which keep its dtype, where a condition holds."""
    table = x.graph.add_param("t", TensorType(F32, (5, 1)), Literal((0.5, 1.5, 2.5, 3.5, 4.5), (5, 1)))
    rows = ops.embedding(ops.cast(ops.clip(x, low=0.0), to=dtypes.i64), table)
    return ops.squeeze(mask_fill(ops.unsqueeze(ops.less(x, 3.0), axes=(2,)), rows), axes=(2,))


CORNERS = {
    "a power of a number": lambda x: ops.pow(ops.affine(x, by=0.0, plus=24**-0.5), x),
    "a power of a negative number": lambda x: ops.pow(ops.affine(x, by=0.0, plus=-2.0), ops.floor(x)),
    "a number that is none": lambda x: ops.add(ops.affine(x, by=0.0, plus=math.nan), x),
    "plus a number that is none": lambda x: ops.affine(x, by=2.0, plus=math.nan),
    "a third": lambda x: ops.affine(x, by=1 / 3),
    "minus a third": lambda x: ops.affine(x, by=-1 / 3, plus=-0.1),
    "a tiny factor": lambda x: ops.affine(x, by=5e-324),
    "the root of a number": lambda x: ops.affine(x, by=768**-0.5),
    "a root under a sum": lambda x: ops.div(ops.affine(x, by=0.0, plus=7**0.5), x),
    "an endless factor": lambda x: ops.clip(ops.affine(x, by=math.inf), low=-1.0, high=1.0),
    "one of many": lambda x: ops.squeeze(ops.slice_(x, axis=1, start=2, stop=3), axes=(1,)),
    "the last of many": lambda x: ops.squeeze(ops.slice_(x, axis=-1, start=3, stop=4), axes=(-1,)),
    "there and back": repeated_reshape,
    "rows of a table under a condition": chosen_rows,
}


@pytest.mark.parametrize("name", CORNERS)
def test_unusual_constants_and_shapes_equal_the_interpreter(name: str) -> None:
    check(small_graph(CORNERS[name]), ROWS)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x,
        lambda x: ops.affine(x, by=0.5),
        lambda x: ops.div(x, ops.affine(ops.sigmoid(x), by=0.0, plus=4.0)),
        lambda x: ops.affine(ops.affine(x, by=2.0), plus=1.0),
    ],
)
def test_softmax_of_fully_masked_rows_is_zero(change: Callable[[Value], Value]) -> None:
    """Check that a softmax over −∞ alone is zero, for scores that other ops computed."""
    check(small_graph(lambda x: ops.softmax(change(x))), HIDDEN)


def program_of(*scopes: str) -> tuple[Program, list[Statement]]:
    """Return a program whose statements compute a mask of the encoder's input, then read it in `scopes`."""
    source, mask = Var("source", skips=True), Var("mask")
    statements = [Statement("{0} > 0", (source,), (mask,), "", early=True)]
    statements += [Statement("f({0}, {1})", (source, mask), (Var("y"),), scope) for scope in scopes]
    last = statements[-1].results[0]
    return Program("p", [source], {"y": last}, statements), statements


def test_statement_that_only_the_encoder_reads_moves() -> None:
    program, statements = program_of("encoder.layers.0", "encoder")
    moved = move_into_encoder(program, statements)
    assert [(s.scope, s.early) for s in moved] == [("encoder", False), ("encoder.layers.0", False), ("encoder", False)]
    assert [s.text for s in moved] == [s.text for s in statements]


def test_statement_that_others_read_stays() -> None:
    program, statements = program_of("encoder")
    mask = statements[0].results[0]
    statements.append(Statement("g({0})", (mask,), (Var("z"),), "decoder"))
    assert move_into_encoder(program, statements) == statements
    program.outputs["mask"] = mask
    assert move_into_encoder(program, statements[:2]) == statements[:2]


def test_nothing_moves_with_two_readers_or_none() -> None:
    for scopes in (("encoder", "decoder"), ()):
        program, statements = program_of(*scopes)
        assert move_into_encoder(program, statements) is statements
