"""Run pipelines: apply passes one after another to a copy of the graph, and call hooks after each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
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


@dataclass(frozen=True, kw_only=True)
class PassRun(PassRecord):
    """The record of a pass that ran, for hooks; `index` counts the passes of the run from 1.

    `after` is the pipeline's graph, not a copy; `before` is a copy if `run_passes` verifies, else None.
    """

    index: int
    after: Graph
    before: Graph | None = None


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
    store: Path | None = None,
) -> Graph:
    """Run `pipeline` on a copy of `graph` and return the copy; its well-formedness is checked after every pass.

    verify: also check the declared effect of every pass, on small random inputs and weights (from `seed`) in float64.
    dump: a folder, created if missing, for the IR text of the input and after every pass, as ``NN-pass.weft``.
    report: gets one record per pass; hooks: are called with a `PassRun` after every pass.
    progress: is called as progress(pass name, done, total) by passes that take long.
    store: a folder in which passes that fit long keep results for a later run (`choose_store`).

    Raises:
        WeftError: on a syntax error in `pipeline`, a pass that refuses the graph, or a failed check (naming the pass).
    """
    if isinstance(pipeline, str):
        pipeline = parse_pipeline(pipeline, default_pipeline(graph))
    current, equivalence = graph.clone(), EquivalenceCheck(seed)
    if dump is not None:
        Path(dump).mkdir(parents=True, exist_ok=True)
        _write(dump, 0, "input", current)
    price = GraphCost.of(current) if report is not None and report.priced else None
    steps = [(phase.name, applied) for phase in pipeline.phases for applied in phase.passes]
    for index, (phase, applied) in enumerate(steps, 1):
        before, count = current.clone() if verify else None, len(current)
        trace = Trace(progress=partial(progress, applied.name), store=store)
        start = time.perf_counter()
        if not applied.on_fused:
            refuse_fused(current, applied)
        applied.run(current, trace)
        seconds = time.perf_counter() - start
        with _name_pass(f"pass {applied} left a broken graph"):
            verify_graph(current, recipes=False)
        if dump is not None:
            _write(dump, index, applied.name, current)
        equivalence.largest = None
        if before is not None:
            with _name_pass(f"pass {applied} breaks its declared effect ({applied.effect})"):
                applied.check(before, current, equivalence)
        before_price, price = price, None if price is None else GraphCost.of(current)
        costs = None if before_price is None or price is None else (before_price, price)
        evidence = applied.describe_check() if verify else ""
        record = PassRecord(phase, applied, seconds, trace, (count, len(current)), costs, evidence, equivalence.largest)
        if report is not None:
            report.records.append(record)
        for hook in hooks:
            hook(PassRun(**vars(record), index=index, after=current, before=before))
    return current


def refuse_fused(graph: Graph, applied: Pass) -> None:
    """Raise WeftError if `graph` has a fused op, naming it and the pass `applied`, which does not support fused ops."""
    if (node := next(filter(is_fused, graph.nodes), None)) is not None:
        raise WeftError(
            f"pass {applied.name} does not support fused ops, such as {node.op.name} (%{node.output.name}): run it "
            "before the passes that fuse, or after unfuse"
        )


@contextlib.contextmanager
def _name_pass(fault: str) -> Iterator[None]:
    try:
        yield
    except WeftError as e:
        raise WeftError(f"{fault}: {e}") from e


def _write(folder: str | Path, index: int, name: str, graph: Graph) -> None:
    Path(folder, f"{index:02d}-{name}.weft").write_text(print_graph(graph), encoding="utf-8")
