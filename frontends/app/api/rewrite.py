"""Rewriting of a model by a pipeline, given as a string or in a file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import expand_home, read_text
from weft.passes import Report, default_pipeline, parse_pipeline, run_passes
from weft.passes.runner import Hook, Progress

from ...model import Model

SUFFIX = ".pipeline"
PUBLISHED = {  # pipelines by name; every pass except the last is exact
    f"best-int{bits}": f"fold-norm-scale, rotate-residual, rotate-heads, quantize{{bits={bits}}}" for bits in (4, 3)
}
MAX_BYTES = 1 << 20  # maximum bytes of a pipeline file
_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|#.*')
_PHASE = re.compile(r"[\w-]+\s*:")


def resolve_pipeline(pipeline: str) -> str:
    """Return the pipeline that `pipeline` is or refers to: itself, a published one (``@name``), or a file's contents.

    A file is named by ``@path``, or by a path that ends in .pipeline. In the file ``#`` begins a comment. A line break
    outside of braces is read as a comma, or as a semicolon if the next line begins a phase (``name:``).

    Raises:
        WeftError: if the file cannot be read.
    """
    pipeline = pipeline.strip()
    if not (pipeline.startswith("@") or re.fullmatch(rf"[^,{{]+{re.escape(SUFFIX)}", pipeline)):
        return pipeline
    name = pipeline.removeprefix("@")
    if name in PUBLISHED:
        return PUBLISHED[name]
    try:
        text = read_text(expand_home(name), MAX_BYTES).removeprefix("\ufeff")
    except WeftError as e:
        raise WeftError(f"the pipeline file {e}; @{' and @'.join(PUBLISHED)} are published with weft") from e
    joined, depth = "", 0
    for line in text.splitlines():
        line = _COMMENT.sub(lambda match: match[1] or "", line).strip()
        if line:
            if joined and not depth and joined[-1] not in ",;:" and line[0] not in ",;":
                joined += ";" if _PHASE.match(line) else ","
            joined += (" " if joined else "") + line
        depth += sum("{[".count(c) - "}]".count(c) for c in line)
    return joined.rstrip(", ")


def rewrite(
    model: Model,
    passes: str,
    *,
    verify: bool = False,
    dump: str | Path | None = None,
    report: Report | None = None,
    hooks: Iterable[Hook] = (),
    progress: Progress = lambda name, done, total: None,
    store: Path | None = None,
) -> Model:
    """Return `model` with its graph rewritten by the pipeline `passes` (a string, or a file as in `resolve_pipeline`).

    `store` is a folder for results of long fits, as in `run_passes`. An empty pipeline returns `model`; others drop its
    `module`, and also its `settings` unless all passes are exact.

    Raises:
        WeftError: if the pipeline is invalid, or a pass cannot be applied.
    """
    pipeline = parse_pipeline(resolve_pipeline(passes), default_pipeline(model.graph))
    if not pipeline.passes:
        return model
    options: dict[str, Any] = {"verify": verify, "dump": dump, "hooks": hooks, "progress": progress, "store": store}
    report, done = report or Report(), len(report.records if report else ())
    graph = run_passes(model.graph, pipeline, report=report, **options)
    records = (*model.passes, *(record.json() for record in report.records[done:]))
    pipelines = "; ".join(text for text in (model.pipeline, str(pipeline)) if text)
    exact = all(step.effect == "exact" for step in pipeline.passes)
    settings = model.settings if exact else None
    return replace(model, graph=graph, module=None, pipeline=pipelines, passes=records, settings=settings)
