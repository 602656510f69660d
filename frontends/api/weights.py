"""Weights in fewer bits by one word: ``int4``, ``int8``, ``fp8`` and so on, as the passes that make a model so."""

from __future__ import annotations

import re

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.passes import lookup, parse_pipeline, run_passes
from weft.passes.library.quantize.quantize import QuantizeWeights

BITS = (2, 3, 4, 8)
FLOATS = ("fp8", "mxfp4", "nvfp4")
_FORM = re.compile(r"\s*([a-z]+)(\d+)\s*(?:\{(.*)\})?\s*", re.DOTALL)
# Exact rewrites after which weights lose less when they are rounded; a graph that one does not fit goes without it.
PREPARED = ("fold-norm-scale, rotate-residual, rotate-heads", "rotate-heads")


def weights_pipeline(graph: Graph, text: str) -> str:
    """Return the pipeline that `text` is short for: ``int4``, or with arguments of `quantize`, ``int4{group=64}``.

    Floats, and integers of 8 bits, are rounded to the nearest; integers of fewer are fitted to a text, after exact
    rewrites that spread what is large in a few places over all, where the graph allows them: without a text they lose
    more than they gain. Weights that a file has in such codes already stay as they are.

    Raises:
        WeftError: if the text is of another form.
    """
    match = _FORM.fullmatch(text)
    kind, bits = (match[1], int(match[2])) if match else ("", 0)
    if match is None or not ((kind == "int" and bits in BITS) or f"{kind}{bits}" in FLOATS):
        known = ", ".join([*(f"int{bits}" for bits in BITS), *FLOATS])
        raise WeftError(
            f"--weights {text!r} is not known; it takes {known}, each with arguments of the pass quantize if need be, "
            'such as "int4{group=64}"'
        )
    given = (match[3] or "").strip()
    arguments = [f"bits={bits}" if kind == "int" else f"format={kind}{bits}", *([given] if given else [])]
    if kind != "int":
        return f"{lookup('quantize').name}{{{', '.join(arguments)}}}"
    last = f"{lookup('quantize').name}{{{', '.join(arguments)}}}"
    (step,) = parse_pipeline(last).passes
    assert isinstance(step, QuantizeWeights)
    nearest = step.method == "rtn" or step.searches or (not step.reads and step.method == "auto")
    if nearest or (graph.tokenize is None and step.calibration is None) or step.keeps(graph):
        return last
    return ", ".join([*_fitting(graph), last])


def _fitting(graph: Graph) -> list[str]:
    """The first of the prepared pipelines that the graph allows; none if it allows none."""
    for pipeline in PREPARED:
        try:
            run_passes(graph, pipeline)
        except WeftError:
            continue
        return [pipeline]
    return []
