"""Run pipelines: apply passes one after another to a copy of the graph, and call hooks after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from weft.ir import Graph, WeftError, print_graph
from weft.ir import verify as verify_graph

from .core.base import Pass
from .core.equivalence import EquivalenceCheck
from .core.pipeline import Pipeline
from .core.text import parse_pipeline
from .core.trace import Trace
from .default import default_pipeline
from .edits.legalization import is_fused
from .report import GraphCost, PassRecord, Report


@dataclass
class PassRun:
    """A record of one pass that ran, passed to hooks: `index` counts from 1, `nodes` are counts (before, after).

    `after` is the pipeline's graph, not a copy; `before` is a copy if the run verifies, else None.
    """

    index: int
    phase: str
    applied: Pass
    seconds: float
    trace: Trace
    nodes: tuple[int, int]
    after: Graph
    before: Graph | None = None

    @property
    def rewrites(self) -> int:
        return self.trace.rewrites.total()


Hook = Callable[[PassRun], None]
Progress = Callable[[str, int, int], None]  # (name of the pass, done, total)


def run_passes(
    graph: Graph,
    pipeline: str | Pipeline = "default",
    *,
    verify: bool = False,
    dump: str | Path | None = None,
    report: Report | None = None,
    hooks: Iterable[Hook] = (),
    seed: int = 0,
    progress: Progress = lambda name, done, total: None,
) -> Graph:
    """Run `pipeline` on a copy of `graph` and return the copy; its well-formedness is checked after every pass.

    verify: also check the declared effect of every pass, on small random inputs and weights (from `seed`) in float64.
    dump: a folder, created if missing, for the IR text of the input and after every pass, as ``NN-pass.weft``.
    report: gets one record per pass; hooks: are called with a `PassRun` after every pass.
    progress: is called as progress(pass name, done, total) by passes that take long.

    Raises:
        WeftError: on a syntax error in `pipeline`, a pass that refuses the graph, or a failed check (naming the pass).
    """
    if isinstance(pipeline, str):
        pipeline = parse_pipeline(pipeline, default_pipeline(graph))
    current, equivalence = graph.clone(), EquivalenceCheck(seed)
    if dump is not None:
        Path(dump).mkdir(parents=True, exist_ok=True)
        _write(dump, 0, "input", current)
    index, priced = 0, report is not None and report.priced
    price = GraphCost.of(current) if priced else None
    for phase in pipeline.phases:
        for applied in phase.passes:
            index += 1
            before, count = current.clone() if verify else None, len(current)
            trace = Trace(progress=partial(progress, applied.name))
            start = time.perf_counter()
            if not applied.on_fused:
                refuse_fused(current, applied)
            applied.run(current, trace)
            seconds = time.perf_counter() - start
            step = PassRun(index, phase.name, applied, seconds, trace, (count, len(current)), current, before)
            equivalence.largest = None
            _verify_graph(step)
            if dump is not None:
                _write(dump, index, applied.name, current)
            if verify:
                _check_effect(step, equivalence)
            if report is not None:
                old_price, price = price, GraphCost.of(current) if priced else None
                prices = (old_price, price) if old_price is not None and price is not None else None
                shown = (applied.describe_check() if verify else "", equivalence.largest)
                report.records.append(PassRecord(phase.name, applied, seconds, trace, step.nodes, prices, *shown))
            for hook in hooks:
                hook(step)
    return current


def refuse_fused(graph: Graph, applied: Pass) -> None:
    """Raise WeftError if `graph` has a fused op, naming it and the pass `applied`, which does not support fused ops."""
    if (node := next(filter(is_fused, graph.nodes), None)) is not None:
        raise WeftError(
            f"pass {applied.name} does not support fused ops, such as {node.op.name} (%{node.output.name}): run it "
            "before the passes that fuse, or after unfuse"
        )


def _verify_graph(step: PassRun) -> None:
    try:
        verify_graph(step.after, recipes=False)
    except WeftError as e:
        raise WeftError(f"pass {step.applied} left a broken graph: {e}") from e


def _write(folder: str | Path, index: int, name: str, graph: Graph) -> None:
    Path(folder, f"{index:02d}-{name}.weft").write_text(print_graph(graph), encoding="utf-8")


def _check_effect(step: PassRun, equivalence: EquivalenceCheck) -> None:
    assert step.before is not None
    try:
        step.applied.check(step.before, step.after, equivalence)
    except WeftError as e:
        raise WeftError(f"pass {step.applied} breaks its declared effect ({step.applied.effect}): {e}") from e
