"""`weft.bisect`: compare two models on the same tokens, and find the first operation whose results differ."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.backends.alignment.layer_alignment import find_layer
from weft.backends.alignment.traces import ValueTrace, align_traces, arrange, compute_error
from weft.ir.errors import WeftError
from weft.ir.storage import replace_file
from weft.passes.runner import Progress

from ..draw.comparing import check_html_suffix, draw_difference
from ..draw.drawable import list_files
from ..verify.error_bounds import compute_log_softmax, compute_tolerance
from ..verify.verification import MAX_WATCHED, PROMPT
from .search import FirstDifference, find_difference
from .sides import LOG_PROBABILITIES, BisectionSide, open_side, split_prefix

ANSWER = 8  # tokens that the decoder of an encoder-decoder reads
LOGITS = "logits"


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`.

    a, b: descriptions of the models. tokens: ids that both read. tolerance: relative error that rounding explains.
    errors: relative errors of the outputs, keyed by name. difference: the first inside the models, or None.
    outputs_only: no values inside the models were compared.
    """

    a: str
    b: str
    tokens: list[int]
    tolerance: float
    errors: dict[str, float]
    difference: FirstDifference | None
    outputs_only: bool

    @property
    def differs(self) -> bool:
        """Return whether the models differ beyond rounding (a NaN does)."""
        return self.difference is not None or any(not error <= self.tolerance for error in self.errors.values())

    def json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        data: dict[str, Any] = {k: v for k, v in vars(self).items() if k != "difference"} | {"differs": self.differs}
        if (d := self.difference) is not None:
            places = [{"op": place.op, "name": place.name, "makes": place.makes} for place in d.places]
            data |= {"values": d.values, "error": d.error, "places": places, "at": "ab"[d.at], "kind": d.kind}
            data["how"] = d.describe()
        return data


def bisect(
    a: Any,
    b: Any,
    *,
    prompt: str | None = None,
    ids: Sequence[int] | None = None,
    trust: bool = False,
    viz: str | Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Bisection:
    """Find the first operation of two models whose results differ beyond rounding, and how they differ.

    Args:
        a, b: the models: a source (run by the float64 interpreter), a compiled folder, or an ONNX file of any exporter;
            ``transformers:FOLDER`` (a Hugging Face folder), ``torch:SOURCE`` (weft's PyTorch module, in float32),
            ``optimized:FOLDER`` (an ONNX model after ONNX Runtime's optimizer), ``llama.cpp:FILE.gguf`` (outputs only);
            in Python also a PyTorch module.
        prompt: text that both read, encoded by the first tokenizer of a and b; default: a built-in sentence.
        ids: token ids instead of a text.
        trust: run the Python of folders compiled for PyTorch.
        viz: page (.html) to write, with both models and the place marked.
        progress: called with (stage, done, total).

    Raises:
        WeftError: if a model cannot be read or run, or they have no output in common.
    """
    if viz is not None:
        check_html_suffix(Path(viz))
    with ExitStack() as stack:
        sides = [open_side(side, stack, trust) for side in (a, b)]
        tokens = _choose_tokens(sides, prompt, ids)
        x, y = (_run(side, tokens, progress) for side in sides)
        outputs_only = max(side.detail for side in sides) == 3
        tolerance, errors = _compute_tolerance(x, y), _compare_outputs(sides, (x, y), outputs_only)
        first = int(sides[1].detail < sides[0].detail)
        pair = None if outputs_only else align_traces(x, y, tolerance)
        difference = None if pair is None else find_difference(pair, first, tolerance)
    if viz is not None:
        _write_page((a, b), difference, Path(viz), trust)
    return Bisection(sides[0].description, sides[1].description, tokens, tolerance, errors, difference, outputs_only)


def _choose_tokens(sides: Sequence[BisectionSide], prompt: str | None, ids: Sequence[int] | None) -> list[int]:
    vocab = min((side.vocab for side in sides if side.vocab), default=0)
    text = PROMPT if prompt is None else prompt
    encoded = next((tokens for side in sides if ids is None and (tokens := side.encode(text)) is not None), ids)
    if encoded is None and prompt is not None:
        raise WeftError("neither model has a tokenizer to read the prompt with: give token ids instead (--ids)")
    if encoded is None:
        encoded = np.random.default_rng(0).integers(0, vocab or 64, MAX_WATCHED).tolist()
    tokens = list(encoded if prompt is not None or ids is not None else encoded[:MAX_WATCHED])
    if not tokens or min(tokens) < 0 or max(tokens) >= (vocab or max(tokens) + 1):
        raise WeftError(f"the models need one or more token ids from 0 to {vocab - 1 if vocab else '…'}, not {tokens}")
    return tokens


def _run(side: BisectionSide, tokens: list[int], progress: Progress) -> ValueTrace:
    ids, source = (tokens[:ANSWER], tokens) if side.has_encoder else (tokens, [])
    return side.run(ids, source, lambda done, total: progress(f"running {side.description}", done, total))


def _compute_tolerance(*traces: ValueTrace) -> float:
    """Return the tolerance of `weft verify` for the lower precision, the larger depth and the longest sum of both."""
    dtype = max((t.dtype for t in traces), key=["f64", "f32", "f16", "bf16"].index)
    depth = max(len({find_layer(op.name) for op in t.operations} - {""}) for t in traces)
    reduction = max((min(shape) for t in traces for shape, _ in t.constants.values() if len(shape) == 2), default=1)
    return compute_tolerance("f32" if dtype == "f64" else dtype, depth, reduction, any(t.rounded for t in traces))


def _compare_outputs(sides: Sequence[BisectionSide], traces: Sequence[ValueTrace], only: bool) -> dict[str, float]:
    """Return relative errors of outputs, keyed by name; outputs without a name in common are paired by their shapes.

    If there are `only` outputs, they are the log-probabilities of the token after the last one.
    """
    for trace in traces if only else ():
        if LOGITS in trace.outputs:
            logits = trace.values[trace.outputs[LOGITS]]
            trace.values[LOG_PROBABILITIES] = compute_log_softmax(logits.reshape(-1, logits.shape[-1])[-1])
            trace.outputs = {LOG_PROBABILITIES: LOG_PROBABILITIES}
    x, y = ({name: t.values[v] for name, v in t.outputs.items() if t.values[v].dtype.kind == "f"} for t in traces)
    sizes = {array.size: array for array in y.values()}
    partners = {name: y[name] for name in x if name in y} or {n: sizes[v.size] for n, v in x.items() if v.size in sizes}
    arranged = {name: arrange(x[name], array) for name, array in partners.items()}
    errors = {name: compute_error(*pair) for name, pair in arranged.items() if pair is not None}
    if not errors:
        texts = (f"{side.description} has {', '.join(t.outputs)}" for side, t in zip(sides, traces, strict=True))
        raise WeftError(f"the models have no output in common: {', '.join(texts)}")
    return errors


def _write_page(sides: Sequence[Any], difference: FirstDifference | None, out: Path, trust: bool) -> None:
    """Write the page of both models to `out` atomically. A model with a prefix is drawn as its source or ONNX files.

    Raise WeftError for a PyTorch module.
    """
    sources = [split_prefix(side)[1] for side in sides]
    if any(hasattr(source, "named_modules") for source in sources):
        raise WeftError("a PyTorch module cannot be drawn: name its source, as torch:SOURCE or transformers:FOLDER")
    names, text = set[str](), "equal"
    if difference is not None:
        names = {*difference.values, *(x for place in difference.places for x in place.makes if x)}
        text = "; ".join([difference.kind, *difference.describe()[:1]])
    page = draw_difference(sources[0], sources[1], trust=trust, place=(names, text)).page()
    with replace_file(out, list_files(*sources)) as path:
        path.write_text(page, encoding="utf-8")
