"""Open models held against the first of them on the same tokens: likelihood, divergence, errors inside, time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from weft.backends.runtime.core.decoder import Decoder
from weft.backends.runtime.core.generate import Generator
from weft.backends.runtime.core.rows import BatchContext
from weft.backends.runtime.ort.encoder import Encoder
from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array
from weft.passes.runner import Progress

from .errors import log_softmax
from .internals import internals_of, stock_inputs

_NUMBERS = 1 << 22  # logits of a chunk: tokens × vocabulary
_LINES = 32  # that an encoder reads together
_ROUNDS, _STEPS, _PROMPT = 9, 4, 64  # rounds of timing, most steps of a round, tokens before them
_LONG = 0.02  # seconds: a step that takes longer is timed well enough alone


@dataclass
class Tally:
    """Means over the tokens predicted so far: of −ln q(token), of KL(p ‖ q), and of whether the likeliest are the same,
    p being the first model's distribution and q this one's."""

    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agreement: float = 0.0
    divergences: list[float] = field(default_factory=list, repr=False)  # the KL of each token

    @property
    def kl_99(self) -> float:
        """The KL that 99 % of the tokens stay below."""
        return float(np.quantile(self.divergences, 0.99))

    def add(self, nll: Array, kl: Array, agreement: Array) -> None:
        """Take in the values of some more tokens, each [tokens]."""
        self.tokens += len(nll)
        self.divergences += kl.tolist()
        for name, new in (("nll", nll), ("kl", kl), ("agreement", agreement)):
            mean = getattr(self, name)
            setattr(self, name, float(mean + (new - mean).sum() / self.tokens))


def score_tokens(
    models: Sequence[Generator], ids: Sequence[int], window: int, whole: bool, progress: Progress
) -> list[Tally]:
    """Predict every token of `ids` but the first from at most `window` tokens before it.

    Windows do not overlap: the first token of one is predicted by the last of the one before. Logits are held for a
    chunk of a window at a time, all of it where `whole` (tokens of a call compete).
    """
    tallies, vocab = [Tally() for _ in models], models[0].decoder.vocab
    chunk = window if whole else max(1, min(window, _NUMBERS // vocab))
    with contextlib.ExitStack() as stack:
        contexts = [stack.enter_context(m.decoder.context(1, min(window, len(ids) - 1))) for m in models]
        for start in range(0, len(ids) - 1, window):
            for context in contexts:
                context.reset()
            end = min(start + window, len(ids) - 1)
            for at in range(start, end, chunk):
                upto = min(at + chunk, end)
                inputs, targets = ids[at:upto], np.asarray(ids[at + 1 : upto + 1])
                rows = zip(models, contexts, strict=True)
                _compare(tallies, (_extended(m.decoder, context, inputs) for m, context in rows), targets)
                progress("reading", upto, len(ids) - 1)
    return tallies


def _compare(tallies: Sequence[Tally], logits: Iterator[Array], targets: Array) -> None:
    """Add a chunk: `logits` [tokens, vocab] of each model in turn, `targets` [tokens]."""
    first: Array | None = None
    for tally, scores in zip(tallies, logits, strict=True):
        own = log_softmax(scores)
        if first is None:
            first, likely = own, np.exp(own)
        kl = np.einsum("tv,tv->t", likely, first - own)
        tally.add(-own[np.arange(len(targets)), targets], kl, own.argmax(-1) == first.argmax(-1))


def _extended(decoder: Decoder[Any], context: BatchContext, ids: Sequence[int]) -> Array:
    """The logits of `ids` after what `context` holds, [tokens, vocab]: of one call, or where a model gives but those of
    the last token, of one call each."""
    if decoder.every_position:
        return context.extend(ids)
    return np.concatenate([context.extend([token]) for token in ids])


def score_embeddings(models: Sequence[Encoder], rows: Sequence[Sequence[int]], progress: Progress) -> list[float]:
    """The mean cosine between each model's embeddings of `rows` and the first model's.

    Raises:
        WeftError: if the embeddings differ in width.
    """
    sums = [0.0 for _ in models]
    for at in range(0, len(rows), _LINES):
        vectors = [np.asarray(m.encode(rows[at : at + _LINES], normalize=True), np.float64) for m in models]
        if wrong := [v.shape[1] for v in vectors if v.shape != vectors[0].shape]:
            raise WeftError(f"embeddings of {vectors[0].shape[1]} and of {wrong[0]} numbers cannot be compared")
        sums = [s + float((v * vectors[0]).sum()) for s, v in zip(sums, vectors, strict=True)]
        progress("embedding", min(at + _LINES, len(rows)), len(rows))
    return [s / len(rows) for s in sums]


def stream_errors(models: Sequence[Generator | Encoder], ids: Sequence[int]) -> list[dict[str, float]]:
    """For each model, ‖x − x₀‖ / ‖x₀‖ (Frobenius) by layer: x is what the layer hands on for `ids`, x₀ what that of the
    first model does. Where one has more layers than the other only what the last hands on is compared; what has another
    shape is left out.
    """
    want: dict[str, Array] = {}
    distances = []
    for model in models:
        got = _handed_on(model, ids)
        want = want or got
        if len(got) != len(want):
            got = dict(zip([*want][-1:], [*got.values()][-1:], strict=False))
        shared = {layer: x for layer, x in got.items() if layer in want and x.shape == want[layer].shape}
        distances.append({layer: _distance(x, want[layer]) for layer, x in shared.items()})
    return distances


def _handed_on(model: Generator | Encoder, ids: Sequence[int]) -> dict[str, Array]:
    """The residual stream after each layer, [1, tokens, dim] in float64, through a second session."""
    if not (graphs := internals_of(model)):
        raise WeftError(f"{model.folder}: what layers hand on is compared inside ONNX models, and this one is PyTorch")
    inside = graphs[-1]
    names = dict.fromkeys(name for parts in inside.streams.values() for name in parts)
    values = inside.run(stock_inputs(inside.inputs, ids), names)
    streams = {layer: [values[name].astype(np.float64) for name in parts] for layer, parts in inside.streams.items()}
    return {layer: sum(parts[1:], parts[0]) for layer, parts in streams.items()}


def _distance(got: Array, want: Array) -> float:
    return float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), np.finfo(np.float64).tiny))


def seconds_per_token(models: Sequence[Generator | Encoder], ids: Sequence[int], progress: Progress) -> list[float]:
    """Measure each model's seconds per token: a decode step after some of `ids`, or for encoders a token's share of
    embedding `ids`.

    Models take turns, so that other load on the machine hits all alike; the result is the median over turns.
    """
    taken: list[list[float]] = [[] for _ in models]
    with contextlib.ExitStack() as stack:
        turns = [stack.enter_context(_turn(m, ids)) for m in models]
        for done in range(_ROUNDS + 1):
            for turn, seconds in zip(turns, taken, strict=True):
                start = time.perf_counter()
                tokens = turn()
                seconds.append((time.perf_counter() - start) / tokens)
            progress("timing", done + 1, _ROUNDS + 1)
    return [median(seconds[1:]) for seconds in taken]  # the first warms up


@contextlib.contextmanager
def _turn(model: Generator | Encoder, ids: Sequence[int]) -> Iterator[Callable[[], int]]:
    """Yield one turn's work of a model; each call returns its number of tokens."""
    if isinstance(model, Encoder):
        encoder = model
        yield lambda: len(encoder.hidden([ids])[0])
        return
    decoder = model.decoder
    room = decoder.max_length - 1
    # All rounds have to fit into the context.
    steps = max(1, min(_STEPS, room // (_ROUNDS + 1)))
    prompt = list(ids[: max(1, min(_PROMPT, room - steps * (_ROUNDS + 1)))])
    with decoder.context(1, min(decoder.max_length, len(prompt) + steps * (_ROUNDS + 1))) as context:
        context.prefill([prompt])
        token = np.array(prompt[-1:])

        def turn() -> int:
            if int(context.lengths[0]) + steps > context.capacity:
                context.prefill([prompt])
            start = time.perf_counter()
            for done in range(1, steps + 1):
                context.step(token)
                if time.perf_counter() - start > done * _LONG:
                    break
            return done

        yield turn
