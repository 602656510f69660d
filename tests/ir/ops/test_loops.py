"""`scan` in float64: five recurrences of papers against definitions that share nothing with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from weft.frontends.dsl import building
from weft.ir import Graph, TensorType, dtypes, interpret, ops, parse, verify
from weft.ir.types import sizes

from ...recurrences import HEADS, RECURRENCES, Recurrence

BATCH, SEQ = 2, 11


def graph_of(recurrence: Recurrence) -> Graph:
    batch, seq = sizes.sym("batch"), sizes.sym("seq")
    with building(Graph("recurrence")) as graph:
        values = [graph.add_input(n, TensorType(dtypes.f32, (batch, seq, *s))) for n, s in recurrence.inputs.items()]
        values += [graph.add_input(n, TensorType(dtypes.f32, s)) for n, s in recurrence.weights.items()]
        graph.add_output("y", recurrence.make(*values))
    verify(graph)
    assert parse(str(graph)) == graph
    return graph


@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrences_of_papers(name: str) -> None:
    recurrence, rng = RECURRENCES[name], np.random.default_rng(7)
    feeds = {n: rng.standard_normal((BATCH, SEQ, *shape)) for n, shape in recurrence.inputs.items()}
    feeds |= {n: rng.standard_normal(shape) for n, shape in recurrence.weights.items()}
    wanted = recurrence.define(*(torch.from_numpy(x) for x in feeds.values())).detach().numpy()
    graph = graph_of(recurrence)
    if "position_ids" in graph.inputs:
        feeds["position_ids"] = np.arange(SEQ)[None].repeat(BATCH, 0)
    found = interpret(graph, feeds)["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-10)


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:2], -1)


DEDICATED: dict[str, Callable[..., np.ndarray]] = {
    "mamba": lambda x, dt, b, c, a: ops.selective_scan.reference(x, np.logaddexp(0, dt), -np.exp(a), b, c),
    "gated linear attention": lambda q, k, v, g: ops.gated_linear_attention.reference(
        *map(_flat, (q, k, v, -np.logaddexp(0, g))), heads=HEADS, groups=HEADS
    ),
    "delta rule": lambda q, k, v, beta: ops.gated_delta_rule.reference(
        *(_flat(x) for x in (q, k / np.sqrt(np.square(k).sum(-1, keepdims=True) + 1e-6), v)),
        1 / (1 + np.exp(-beta)),
        heads=HEADS,
        groups=HEADS,
    ),
}


@pytest.mark.parametrize("name", DEDICATED)
def test_equals_the_op_of_its_own(name: str) -> None:
    recurrence, rng = RECURRENCES[name], np.random.default_rng(8)
    feeds = {n: rng.standard_normal((BATCH, SEQ, *shape)) for n, shape in recurrence.inputs.items()}
    feeds |= {n: rng.standard_normal(shape) for n, shape in recurrence.weights.items()}
    found = interpret(graph_of(recurrence), feeds)["y"]
    np.testing.assert_allclose(_flat(found), DEDICATED[name](*feeds.values()), rtol=1e-10, atol=1e-12)
