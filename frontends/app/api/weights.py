"""Weights in fewer bits by one word: ``int4``, ``int8``, ``fp8`` and so on, as the passes that make a model so."""

from __future__ import annotations

import contextlib
import re

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.passes import lookup, parse_pipeline, run_passes
from weft.passes.analysis.states import has_cache
from weft.passes.fitting.calibration import MIXTURE, feeds, read_tokens
from weft.passes.library.quantize.quantize import QuantizeWeights

BITS = (2, 3, 4, 8)
FEW = 64  # tokens of a text that show whether it can be read
FLOATS = ("fp8", "mxfp4", "nvfp4")
_FORM = re.compile(r"\s*([a-z]+)(\d+)\s*(?:\{(.*)\})?\s*", re.DOTALL)
# Exact rewrites after which weights lose less when they are rounded; a graph that one does not fit goes without it.
PREPARED = ("fold-norm-scale, rotate-residual, rotate-heads", "rotate-heads")


def weights_pipeline(graph: Graph, text: str) -> str:
    """Return the pipeline that `text` is short for: ``int4``, or with arguments of `quantize`, ``int4{group=64}``.

    Floats are rounded to the nearest. So are integers of 8 bits, after channels were scaled by what a text has in them;
    integers of fewer are fitted to a text, after exact rewrites that spread what is large in a few places over all,
    where the graph allows them: without a text they lose more than they gain. Weights that a file has in such codes
    already stay as they are, and method=rtn reads no text.

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
    no_text = graph.tokenize is None and step.calibration is None
    if step.method == "rtn" or step.searches or no_text or step.keeps(graph):
        return last
    if not step.reads:
        scaled = f"{lookup('scale-channels').name}{{bits={bits}, group={step.group}}}, {last}"
        return scaled if _takes_text(graph) else last
    return ", ".join([*_fitting(graph), last])


def _takes_text(graph: Graph) -> bool:
    """Return whether a text, read from its beginning by the tokenizer, is all that `graph` needs."""
    with contextlib.suppress(WeftError):
        return not has_cache(graph) and all(feeds(graph, ids) for ids in read_tokens(graph, str(MIXTURE), FEW))
    return False


def _fitting(graph: Graph) -> list[str]:
    """The first of the prepared pipelines that the graph allows; none if it allows none."""
    for pipeline in PREPARED:
        try:
            run_passes(graph, pipeline)
        except WeftError:
            continue
        return [pipeline]
    return []
