"""Values inside a model for an input: attention weights, residual streams, logits of layers, routes, states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.backends.runtime.ort.session import convert_ort_errors, open_session
from weft.backends.runtime.text.tokenizer import Tokenizer
from weft.ir.errors import WeftError, unknown_name_error
from weft.ir.graph import Graph
from weft.ir.interpreter import interpret
from weft.ir.recipes.readers import Array
from weft.ir.storage import scratch_folder
from weft.ir.types import TensorType
from weft.passes.analysis.layers import Layers
from weft.passes.edits.legalization import is_fused
from weft.passes.library.fuse.unfuse import Unfuse
from weft.passes.library.observe.ablate import SCALE, Ablate
from weft.passes.library.observe.expose import Expose

from ....model import Model, SourceLike
from ..compile import compile
from ..source.sources import load_source
from ..verify.internals import make_inputs

Scales = Mapping[str, float | Sequence[float] | Mapping[int, float]]
Run = Callable[[Mapping[str, Array]], dict[str, Array]]


@dataclass(frozen=True)
class TextTrace:
    """The tokens of an input, `values` inside a model by name, such as attention.layers.3.attn, and its own outputs.

    Arrays have no batch axis: attention weights are [heads, tokens, keys], the residual stream is [tokens, dim].
    """

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    values: dict[str, Array]

    def of(self, kind: str) -> dict[str, Array]:
        """Return the values of a `kind`, such as attention, by place ("layers.3.attn")."""
        start = f"{kind}."
        return {name.removeprefix(start): array for name, array in self.values.items() if name.startswith(start)}


class Tracer:
    """An open model whose values `trace` returns; `inputs` maps the parts that a trace can scale to their types."""

    def __init__(self, graph: Graph, tokenizer: Tokenizer | None, run: Run) -> None:
        self.graph, self._tokenizer, self._run = graph, tokenizer, run
        self.inputs = {n.removeprefix(SCALE): v.type for n, v in graph.inputs.items() if n.startswith(SCALE)}

    def trace(
        self, text: str | Sequence[int], scales: Scales | None = None, source: str | Sequence[int] = ()
    ) -> TextTrace:
        """Return the values for `text`, or for token ids; of an encoder-decoder, `text` is the beginning of the answer
        and `source` the text that the encoder reads.

        `scales` has factors by part: a number, one per head, unit or expert, or a dict by index (others stay 1).

        Raises:
            WeftError: if there is no tokenizer for a text, it has no tokens, or a part or index of `scales` is unknown.
        """
        ids, source_ids = self._encode(text, start=True), self._encode(source)
        if not ids:
            raise WeftError("the text has no tokens: give a longer one")
        names = [name for name in self.graph.inputs if not name.startswith(SCALE)]
        feeds = make_inputs(names, ids, source_ids) | self._fill_scales(scales or {})
        arrays = self._run({name: feeds[name] for name in self.graph.inputs})
        texts = [str(i) if self._tokenizer is None else self._tokenizer.get_token(i) for i in ids]
        values = {name: array[0] if array.ndim else array for name, array in arrays.items()}
        return TextTrace(tuple(ids), tuple(texts), values)

    def _encode(self, text: str | Sequence[int], start: bool = False) -> list[int]:
        if not isinstance(text, str):
            return [int(i) for i in text]
        first = self.graph.meta.get("decoder_start_token_id")
        begins = [first] if start and first is not None and "encoder_input_ids" in self.graph.inputs else []
        if not text:
            return begins
        if self._tokenizer is None:
            raise WeftError(f"{self.graph.name} has no tokenizer to read a text with: give token ids")
        return begins + self._tokenizer.encode(text)

    def _fill_scales(self, scales: Scales) -> dict[str, Array]:
        """Return an array for every input that scales a part."""
        arrays = {name: np.ones(type.concrete({})) for name, type in self.inputs.items()}
        for name, factors in scales.items():
            if name not in arrays:
                raise WeftError(unknown_name_error("part", name, arrays, "parts are scaled by ablate=True"))
            arrays[name] = _read_factors(name, factors, arrays[name])
        return {SCALE + name: array for name, array in arrays.items()}


def _read_factors(name: str, factors: float | Sequence[float] | Mapping[int, float], ones: Array) -> Array:
    if isinstance(factors, Mapping):
        if wrong := [i for i in factors if not -ones.size <= i < ones.size]:
            raise WeftError(f"{name} has no {wrong[0]}: it has {ones.size}, from 0 on")
        array = ones.copy()
        array[list(factors)] = list(factors.values())
        return array
    array = np.asarray(factors, np.float64)
    if array.shape not in ((), ones.shape):
        raise WeftError(f"{name} takes {ones.size} factors, not {array.size}")
    scaled: Array = ones * array
    return scaled


@contextlib.contextmanager
def open_tracer(
    source: SourceLike, what: str = "all", layers: Layers = "all", *, ablate: bool = False, exact: bool = False
) -> Iterator[Tracer]:
    """Yield a `Tracer` of `source`, which is compiled once and opened in ONNX Runtime (f32).

    The kinds of values and `layers` as in the pass expose. With `ablate`, traces can scale heads, hidden units,
    experts and sublayers. With `exact`, and for encoder-decoders, the interpreter runs the model in float64 instead.

    Raises:
        WeftError: if the source cannot be read or compiled, or it has no values of a kind.
    """
    model = load_source(source)
    passes = [*([Ablate(layers=layers)] if ablate else []), Expose(what, layers)]
    graph = Unfuse().apply_to(model.graph) if any(map(is_fused, model.graph.nodes)) else model.graph
    for each in passes:
        graph = each.apply_to(graph)
    with scratch_folder() as folder:
        tokenizer = _open_tokenizer(model, folder)
        if exact or graph.meta.get("kind") == "encoder-decoder":
            yield Tracer(graph, tokenizer, lambda feeds: interpret(graph, feeds))
            return
        compile(graph, folder / "model", target="onnx", dtype="f32", passes="")
        session = open_session(folder / "model" / "model.onnx", device="cpu").ort
        names = [output.name for output in session.get_outputs()]
        types = {name: _get_numpy_type(value.type) for name, value in graph.inputs.items()}

        def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
            with convert_ort_errors(graph.name):
                results = session.run(names, {name: array.astype(types[name]) for name, array in feeds.items()})
            return dict(zip(names, results, strict=True))

        yield Tracer(graph, tokenizer, run)


def _get_numpy_type(type: TensorType) -> Any:
    return np.int64 if type.dtype.is_int else np.float32


def _open_tokenizer(model: Model, folder: Path) -> Tokenizer | None:
    if model.tokenizer is None:
        return None
    files = folder / "tokenizer"
    files.mkdir()
    model.tokenizer(files)
    return Tokenizer(files)


def trace_text(
    source: SourceLike,
    text: str | Sequence[int],
    what: str = "all",
    layers: Layers = "all",
    *,
    scales: Scales | None = None,
    exact: bool = False,
) -> TextTrace:
    """Return values inside `source` for `text`: see `open_tracer`, which compiles only once, and
    `Tracer.trace`."""
    with open_tracer(source, what, layers, ablate=bool(scales), exact=exact) as tracer:
        return tracer.trace(text, scales)
