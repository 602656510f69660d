"""Weights in fewer bits by a short name (``int4``, ``int8``, ``fp8``), which represents a pipeline of passes."""

from __future__ import annotations

import contextlib
import re

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.passes import lookup, parse_pipeline, run_passes
from weft.passes.analysis.states import has_cache
from weft.passes.fitting.calibration import MIXTURE, make_inputs, read_tokens
from weft.passes.library.quantize.quantize import QuantizeWeights

BITS = (2, 3, 4, 8)
SAMPLE_TOKENS = 64  # tokens to test whether the graph can read a text
FLOATS = ("fp8", "mxfp4", "nvfp4")
_FORM = re.compile(r"\s*([a-z]+)(\d+)\s*(?:\{(.*)\})?\s*", re.DOTALL)
# Exact rewrites that reduce the loss of rounding; a graph that does not allow one goes without it.
PREPARATIONS = ("fold-norm-scale, rotate-residual, rotate-heads", "rotate-heads")


def expand_weights(graph: Graph, text: str) -> str:
    """Return the pipeline that `text` abbreviates: ``int4``, or with arguments of `quantize`, ``int4{group=64}``.

    fp8, mxfp4 and nvfp4 only round. int8 rounds after `scale-channels` if the graph can read a calibration text.
    int2, int3 and int4 are fitted to the text, after exact rewrites that spread outliers, if the graph allows them.
    `quantize` runs alone without tokenizer and calibration, by rtn, kquant, hqq, or if most weights keep file blocks.

    Raises:
        WeftError: if `text` is not of this form.
    """
    match = _FORM.fullmatch(text)
    kind, bits = (match[1], int(match[2])) if match else ("", 0)
    if match is None or not ((kind == "int" and bits in BITS) or f"{kind}{bits}" in FLOATS):
        forms = ", ".join([*(f"int{bits}" for bits in BITS), *FLOATS])
        raise WeftError(
            f"--weights {text!r} is not known; it takes {forms}, each with optional arguments of the pass quantize, "
            'such as "int4{group=64}"'
        )
    arguments = [f"bits={bits}" if kind == "int" else f"format={kind}{bits}", (match[3] or "").strip()]
    last = f"{lookup('quantize').name}{{{', '.join(filter(None, arguments))}}}"
    if kind != "int":
        return last
    (step,) = parse_pipeline(last).passes
    assert isinstance(step, QuantizeWeights)
    no_text = graph.tokenize is None and step.calibration is None
    if step.method == "rtn" or step.uses_search or no_text or step.is_mostly_stored(graph):
        return last
    if not step.uses_text:
        with_scales = f"{lookup('scale-channels').name}{{bits={bits}, group={step.group}}}, {last}"
        return with_scales if _can_read_text(graph) else last
    return ", ".join([*_find_preparation(graph), last])


def _can_read_text(graph: Graph) -> bool:
    """Return whether `graph` has no cache, and a text determines all of its inputs (token ids, positions)."""
    with contextlib.suppress(WeftError):
        return not has_cache(graph) and all(
            make_inputs(graph, ids) for ids in read_tokens(graph, str(MIXTURE), SAMPLE_TOKENS)
        )
    return False


def _find_preparation(graph: Graph) -> list[str]:
    """Return a list with the first pipeline of `PREPARATIONS` that runs on `graph`; [] if none does."""
    for pipeline in PREPARATIONS:
        with contextlib.suppress(WeftError):
            run_passes(graph, pipeline)
            return [pipeline]
    return []
