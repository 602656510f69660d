"""Passes in any order: no pipeline leaves a broken graph, and an exact pass is exact wherever it stands.

A seed draws a graph of the zoo and a pipeline, most of whose passes find something to rewrite there.
"""

from __future__ import annotations

import random

import pytest

from weft.ir import Graph, WeftError, parse, verify
from weft.passes import Pass, Trace
from weft.passes.core.equivalence import EquivalenceCheck

from ..sampling import each
from .test_every_pass import examples, golden
from .zoo import ZOO

BOUND = 1e-11


def drawn(seed: int) -> tuple[str, list[Pass]]:
    """A graph by name, and passes to try on it."""
    rng = random.Random(seed)
    name = rng.choice(list(ZOO))
    firing, others = list(golden().get(name, ())), list(examples())
    chosen = [rng.choice(firing if firing and rng.random() < 0.7 else others) for _ in range(rng.randint(3, 6))]
    return name, [examples()[applied] for applied in chosen]


def stepped(graph: Graph, applied: Pass) -> Graph:
    """A copy of `graph` after one pass, sound; `graph` itself where the pass refuses."""
    after = graph.clone()
    try:
        applied.run(after, Trace())
    except WeftError:
        return graph
    verify(after, recipes=True)
    assert parse(str(after)) == after
    return after


@pytest.mark.halved
@pytest.mark.parametrize("seed", each(4, range(150)))
def test_random_pipelines_keep_graphs_valid_and_exact(seed: int) -> None:
    name, pipeline = drawn(seed)
    graph, equivalence, done = ZOO[name](), EquivalenceCheck(), list[str]()
    for applied in pipeline:
        done.append(str(applied))
        try:
            after = stepped(graph, applied)
            if applied.effect == "exact" and after != graph:
                inputs = equivalence.make_inputs(graph)
                equivalence.check_close(equivalence.run(graph, inputs), equivalence.run(after, inputs), BOUND)
        except Exception as e:
            raise AssertionError(f"{name} after {', '.join(done)}: {e}") from e
        graph = after
