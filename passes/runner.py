"""Running pipelines: one pass after the other on a copy of the graph, with hooks in between."""

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
from .report import Price, Record, Report


@dataclass
class Step:
    """One pass that ran. `before` is there when the run verifies."""

    index: int
    phase: str
    applied: Pass
    seconds: float
    trace: Trace
    nodes: tuple[int, int]  # before and after
    after: Graph
    before: Graph | None = None

    @property
    def rewrites(self) -> int:
        return self.trace.rewrites.total()


Hook = Callable[[Step], None]
Progress = Callable[[str, int, int], None]  # name of the pass, done, in all


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
    """Run `pipeline` on a copy of `graph` and return it; the well-formedness of the graph is checked after every pass.

    `verify` also shows the declared effect of every pass on small random inputs and weights (from `seed`) through the
    float64 interpreter. `dump` is a folder that gets the text form before and after every pass, as ``NN-pass.weft``.
    `report` is filled in, `hooks` are called after every pass, `progress` by passes that take long.

    Raises:
        WeftError: if the text of the pipeline is wrong, a pass cannot do its work, or a check fails (naming the pass).
    """
    if isinstance(pipeline, str):
        pipeline = parse_pipeline(pipeline, default_pipeline(graph))
    current = graph.clone()
    every: list[Hook] = [_well_formed]
    if dump is not None:
        folder = Path(dump)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, 0, "input", current)
        every.append(lambda step: _write(folder, step.index, step.applied.name, step.after))
    equivalence = EquivalenceCheck(seed)
    if verify:
        every.append(lambda step: _check_effect(step, equivalence))
    index, priced = 0, report is not None and report.priced
    price = Price.of(current) if priced else None
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
            step = Step(index, phase.name, applied, seconds, trace, (count, len(current)), current, before)
            equivalence.largest = None
            for hook in every:
                hook(step)
            if report is not None:
                dear, price = price, Price.of(current) if priced else None
                prices = (dear, price) if dear is not None and price is not None else None
                evidence = applied.shows() if verify else ""
                done = Record(phase.name, applied, seconds, trace, step.nodes, prices, evidence, equivalence.largest)
                report.records.append(done)
            for hook in hooks:
                hook(step)
    return current


def refuse_fused(graph: Graph, applied: Pass) -> None:
    """Refuse a graph with fused ops, into which `applied` does not look.

    Raises:
        WeftError: naming the first fused op.
    """
    if (node := next(filter(is_fused, graph.nodes), None)) is not None:
        raise WeftError(
            f"pass {applied.name} does not look into fused ops, such as {node.op.name} (%{node.output.name}): run it "
            "before they are made, or after unfuse"
        )


def _well_formed(step: Step) -> None:
    try:
        verify_graph(step.after, recipes=False)
    except WeftError as e:
        raise WeftError(f"pass {step.applied} left a broken graph: {e}") from e


def _write(folder: Path, index: int, name: str, graph: Graph) -> None:
    (folder / f"{index:02d}-{name}.weft").write_text(print_graph(graph), encoding="utf-8")


def _check_effect(step: Step, equivalence: EquivalenceCheck) -> None:
    assert step.before is not None
    try:
        step.applied.check(step.before, step.after, equivalence)
    except WeftError as e:
        raise WeftError(f"pass {step.applied} breaks its declared effect ({step.applied.effect}): {e}") from e
