"""Every pass on every graph of the zoo: it does what it declares and leaves a sound graph, or refuses in a sentence.

How often it rewrites is kept in ``tests/golden/rewrites.json``, so that a fusion that stops firing is noticed. After a
change that is meant: ``WEFT_GOLDEN=write pytest -n 0 tests/passes/test_every_pass.py``, and read the diff.

`make test` runs a pass on an eighteenth of the graphs, of those that it should rewrite and of those that it should
leave alone, and on two that it rewrites at least. `make test-all` and ``WEFT_TESTS=all`` run every pass on every graph.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.ir import Graph, WeftError, interpret, ops, parse, verify
from weft.passes import Pass, Trace, all_passes, parse_pipeline, run_passes
from weft.passes.analysis.costs import compute_cost
from weft.passes.core.equivalence import EquivalenceCheck, RandomReader
from weft.passes.library.cleanup.dce import Dce
from weft.passes.runner import refuse_fused

from ..sampling import ALL
from .zoo import TRIED, ZOO

GOLDEN = Path(__file__).parents[1] / "golden" / "rewrites.json"
ONCE = {  # refuse a second run
    *("fold-token-types", "insert-rope", "kv-cache", "last-token-logits", "multimodal-rope", "quiet-routers"),
}
UNCOUNTED = ("scale-channels",)  # what it finds worth it depends on sums that processors round differently
SAMPLE = 18  # every eighteenth is run, but all where no more than
PASSES, GRAPHS = 2, 4  # passes rewrite a graph, or graphs are rewritten by a pass
Counts = dict[str, dict[str, int]]  # rewrites by graph and pass; without those that rewrote nothing


@functools.cache
def examples() -> dict[str, Pass]:
    """Every pass with the arguments of its documented example."""
    pipelines = {name: parse_pipeline(kind.documentation().pipeline) for name, kind in all_passes().items()}
    return {name: pipeline.passes[0] for name, pipeline in pipelines.items()}


@functools.cache
def golden() -> Counts:
    found: Counts = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


@functools.cache
def left_out() -> frozenset[tuple[str, str]]:
    """Graphs and passes that are not run together."""
    if ALL or os.environ.get("WEFT_GOLDEN") == "write":
        return frozenset()
    graphs = Counter(applied for name in TRIED for applied in golden().get(name, {}))
    pairs, runs = set[tuple[str, str]](), Counter[str]()
    for i, name in enumerate(TRIED):
        firing = [applied for applied in examples() if applied in golden().get(name, {})]
        for j, applied in enumerate(examples()):
            if applied not in firing:
                needed, number = False, i + j
            else:
                at = firing.index(applied)
                rare = graphs[applied] <= GRAPHS or len(firing) <= PASSES
                # Every pass on the first two of its graphs, every graph with one of its passes.
                needed, number = rare or runs[applied] < 2 or at == i % len(firing), i + at
            if number % SAMPLE and not needed:
                pairs.add((name, applied))
            elif applied in firing:
                runs[applied] += 1
    return frozenset(pairs)


def keep(counts: Counts) -> None:
    """Write the table, a line per graph."""
    lines = (f'"{name}": {json.dumps(counts[name], sort_keys=True)}' for name in ZOO if name in counts)
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


class Before(EquivalenceCheck):
    """A graph before all passes, with its text and cost, and trials that remember the weights they drew for a graph,
    and what it made of inputs: checks change neither."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph, self.text, self.cost = graph, str(graph), compute_cost(graph)
        self.staged: dict[int, tuple[Graph, Graph, dict[str, np.ndarray]]] = {}  # by id: the graph, staged, weights
        self.ran: dict[object, dict[str, np.ndarray]] = {}  # outputs by the id of the graph and the inputs
        self.drawn: dict[object, np.ndarray] = {}  # weights by what they depend on

    def randomize_weights(self, graph: Graph) -> Graph:
        staged = super().randomize_weights(graph)
        reader = staged.reader
        assert isinstance(reader, RandomReader)
        draw = reader.draw

        def remembered(key: str) -> np.ndarray:
            asked = key, reader.shape(key), key in self.exact, self.signs.get(key)
            if asked not in self.drawn:
                self.drawn[asked] = draw(key)
            return self.drawn[asked]

        reader.draw = remembered
        return staged

    def run(self, graph: Graph, inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        if id(graph) not in self.staged:
            staged = self.randomize_weights(graph)
            weights = {name: p.recipe.evaluate(staged.reader) for name, p in staged.params.items()}
            self.staged[id(graph)] = graph, staged, weights
        _, staged, weights = self.staged[id(graph)]
        asked = id(graph), *((name, a.dtype.str, a.shape, a.tobytes()) for name, a in sorted(inputs.items()))
        if asked not in self.ran:
            self.ran[asked] = interpret(staged, inputs, params=weights)
        return dict(self.ran[asked])


def rewrites(applied: Pass, before: Before) -> int:
    """Return how often `applied` rewrites; everything that must hold for what it leaves does."""
    after, trace = before.graph.clone(), Trace()
    try:
        if not applied.on_fused:
            refuse_fused(after, applied)
        applied.run(after, trace)
    except WeftError as e:
        if len(str(e).splitlines()) != 1:
            raise ValueError(f"refuses in other than one line: {e}") from e
        return 0
    verify(after, recipes=True)
    text, count = str(after), trace.rewrites.total()
    assert (text != before.text) == (count > 0), f"counts {count} rewrites, and the text changed: {text != before.text}"
    if not count:
        return count
    assert str(parse(text)) == text, "its text says something else"
    applied.check(before.graph, after, before)
    if applied.effect == "exact":
        Pass.check(applied, before.graph, after, before)
    if not applied.tradeoff:
        now = compute_cost(after)
        assert now.flops <= before.cost.flops, f"costs {now.flops} FLOPs instead of {before.cost.flops}"
        moved = [c.read + c.written for c in (before.cost, now)]
        assert moved[1] <= moved[0], f"moves {moved[1]} bytes instead of {moved[0]}"
    assert not applied.idempotent or (twice := again(applied, after)) == text, f"a second run changes more:\n{twice}"
    return count


def again(applied: Pass, after: Graph) -> str:
    """The text after a second run, or why there is none; those of `ONCE` may refuse it."""
    twice = after.clone()
    try:
        applied.run(twice, Trace())
    except WeftError as e:
        return str(after) if applied.name in ONCE else f"refuses a second run: {e}"
    return str(twice)


@pytest.mark.halved
@pytest.mark.parametrize("name", TRIED)
def test_every_pass_keeps_its_declared_promise(name: str) -> None:
    before, counts, failures = Before(ZOO[name]()), dict[str, int](), list[str]()
    prepared = {"": before}
    for applied in examples().values():
        if (name, applied.name) in left_out():
            continue
        try:
            if applied.needs not in prepared:
                prepared[applied.needs] = Before(run_passes(before.graph, applied.needs))
            counts[applied.name] = rewrites(applied, prepared[applied.needs])
        except Exception as e:  # all of them in one report
            failures.append(f"{applied}: {type(e).__name__}: {str(e).partition(chr(10))[0]}")
    if str(before.graph) != before.text:
        failures.append("a pass changed a graph that was not given to it")
    if failures:
        pytest.fail(f"{name}:\n" + "\n".join(failures), pytrace=False)
    fired = {applied: count for applied, count in counts.items() if count}
    if os.environ.get("WEFT_GOLDEN") == "write":
        keep(golden() | {name: fired})
        golden.cache_clear()
    kept = golden().get(name, {})
    kept = {applied: count for applied, count in kept.items() if (name, applied) not in left_out()}
    assert {**fired, **dict.fromkeys(UNCOUNTED, 0)} == {**kept, **dict.fromkeys(UNCOUNTED, 0)}


def test_every_pass_fires_somewhere() -> None:
    assert {applied for counts in golden().values() for applied in counts} == set(examples())


def test_samples_cover_every_pass_and_every_graph() -> None:
    pairs = [(name, applied) for name, counts in golden().items() for applied in counts if name in TRIED]
    assert {applied for _, applied in pairs} == set(examples())
    checked = [pair for pair in pairs if pair not in left_out()]
    for which, least in enumerate((1, 2)):
        of_all, of_checked = (Counter(pair[which] for pair in some) for some in (pairs, checked))
        assert all(of_checked[key] >= min(count, least) for key, count in of_all.items())


def clumsy(by: float, trade: str = "", *, counts: bool = True, once: bool = False) -> Pass:
    """A pass that multiplies what a norm makes by a number, and says that it is exact."""

    class Clumsy(Dce):
        tradeoff = trade

        def run(self, graph: Graph, trace: Trace) -> None:
            norm = next(node for node in graph.nodes if node.op is ops.rms_norm)
            if once and norm.output.users[0].op is ops.affine:
                raise WeftError("it is multiplied already")
            with graph.inserting(after=norm):
                product = ops.affine(norm.output, by=by)
            assert product.producer is not None
            norm.output.replace_uses(product, keep=[product.producer])
            if counts:
                trace.record_rewrite(self.name, norm.output.name)

    return Clumsy()


@pytest.mark.parametrize(
    ("applied", "fault"),
    [
        (clumsy(2.0), "output logits differs"),
        (clumsy(1.0), "FLOPs instead of"),
        (clumsy(1.0, "a product"), "a second run changes more"),
        (
            clumsy(1.0, "a product", once=True),
            r"a second run changes more:\s+refuses a second run: it is multiplied already",
        ),
        (clumsy(1.0, counts=False), "counts 0 rewrites"),
    ],
)
def test_broken_passes_are_detected(applied: Pass, fault: str) -> None:
    with pytest.raises((AssertionError, WeftError), match=fault):
        rewrites(applied, Before(ZOO["variant/grouped"]()))
