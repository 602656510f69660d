"""Comparison of open models with the first of them on the same tokens: likelihood, divergence, inner errors, time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from weft.backends.alignment.layer_alignment import align_sequences
from weft.backends.runtime.core.batch_context import BatchContext
from weft.backends.runtime.core.decoder import CachedDecoder
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort.ort_encoder import EncoderModel
from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array
from weft.passes.runner import Progress

from .error_bounds import compute_log_softmax
from .internals import make_inputs, open_internals, to_array

_MAX_LOGITS = 1 << 22  # logits of a chunk: tokens × vocabulary
_BATCH = 32  # lines per batch of an encoder
_ROUNDS, _STEPS, _PROMPT = 9, 4, 64  # rounds of timing, maximum steps per round, tokens before them
_LONG_STEP = 0.02  # seconds: a single step of this length is timed well enough


@dataclass
class Tally:
    """Means over the tokens predicted so far, with p the first model's distribution and q this model's.

    nll: −ln q(token). kl: KL(p ‖ q). agreement: share of equal most likely tokens. divergences: KL of each token.
    """

    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agreement: float = 0.0
    divergences: list[float] = field(default_factory=list, repr=False)

    @property
    def kl_99(self) -> float:
        """Return the 99 % quantile of the KL over tokens."""
        return float(np.quantile(self.divergences, 0.99))

    def add(self, nll: Array, kl: Array, agreement: Array) -> None:
        """Add the values of further tokens; each array is [tokens]."""
        self.tokens += len(nll)
        self.divergences += kl.tolist()
        for name, new in (("nll", nll), ("kl", kl), ("agreement", agreement)):
            mean = getattr(self, name)
            setattr(self, name, float(mean + (new - mean).sum() / self.tokens))


def score_tokens(
    models: Sequence[Generator], ids: Sequence[int], window: int, full_windows: bool, progress: Progress
) -> list[Tally]:
    """Predict every token of `ids` except the first from at most `window` tokens before it; return a tally per model.

    Each window starts without context; its last position predicts the first token of the next window. Only the logits
    of one chunk of a window are in memory. With `full_windows` each window is one forward pass, which is required if
    experts choose among the tokens of a forward pass.
    """
    tallies, vocab = [Tally() for _ in models], models[0].decoder.vocab
    chunk = window if full_windows else max(1, min(window, _MAX_LOGITS // vocab))
    with contextlib.ExitStack() as stack:
        contexts = [stack.enter_context(m.decoder.context(1, min(window, len(ids) - 1))) for m in models]
        for start in range(0, len(ids) - 1, window):
            for context in contexts:
                context.reset()
            end = min(start + window, len(ids) - 1)
            for chunk_start in range(start, end, chunk):
                chunk_end = min(chunk_start + chunk, end)
                inputs, targets = ids[chunk_start:chunk_end], np.asarray(ids[chunk_start + 1 : chunk_end + 1])
                rows = zip(models, contexts, strict=True)
                _add_chunk(tallies, (_extend_logits(m.decoder, context, inputs) for m, context in rows), targets)
                progress("reading", chunk_end, len(ids) - 1)
    return tallies


def _add_chunk(tallies: Sequence[Tally], logits: Iterator[Array], targets: Array) -> None:
    """Add a chunk to the tallies: `logits` [tokens, vocab] of each model in order, `targets` [tokens]."""
    reference: Array | None = None
    for tally, scores in zip(tallies, logits, strict=True):
        log_probs = compute_log_softmax(scores)
        if reference is None:
            reference, likely = log_probs, np.exp(log_probs)
        kl = np.einsum("tv,tv->t", likely, reference - log_probs)
        tally.add(-log_probs[np.arange(len(targets)), targets], kl, log_probs.argmax(-1) == reference.argmax(-1))


def _extend_logits(decoder: CachedDecoder[Any], context: BatchContext, ids: Sequence[int]) -> Array:
    """Append `ids` to `context`; return their logits [tokens, vocab], token by token if only the last has logits."""
    if decoder.every_position:
        return context.extend(ids)
    return np.concatenate([context.extend([token]) for token in ids])


def score_embeddings(models: Sequence[EncoderModel], rows: Sequence[Sequence[int]], progress: Progress) -> list[float]:
    """Return the mean cosine between each model's embeddings of `rows` (token ids) and the first model's.

    Raise WeftError if the embeddings differ in width.
    """
    sums = [0.0 for _ in models]
    for start in range(0, len(rows), _BATCH):
        vectors = [np.asarray(m.encode(rows[start : start + _BATCH], normalize=True), np.float64) for m in models]
        if widths := [v.shape[1] for v in vectors if v.shape != vectors[0].shape]:
            raise WeftError(f"embeddings of {vectors[0].shape[1]} and {widths[0]} features cannot be compared")
        sums = [s + float((v * vectors[0]).sum()) for s, v in zip(sums, vectors, strict=True)]
        progress("embedding", min(start + _BATCH, len(rows)), len(rows))
    return [s / len(rows) for s in sums]


def compute_layer_errors(models: Sequence[Generator | EncoderModel], ids: Sequence[int]) -> list[dict[str, float]]:
    """Return for each model layer → ‖x − x₀‖ / ‖x₀‖ (Frobenius), with x the model's residual stream after the layer.

    x₀ is the first model's stream. If the number of layers differs, layers are aligned in order by their distances, and
    have the first model's names; streams of another shape are left out.

    Raises:
        WeftError: for a PyTorch folder, whose layer outputs are not available.
    """
    expected: dict[str, Array] = {}
    distances = []
    for model in models:
        actual = _compute_streams(model, ids)
        expected = expected or actual
        rows = [
            [_compute_distance(x, y) if x.shape == y.shape else np.inf for x in actual.values()]
            for y in expected.values()
        ]
        pairs = [(i, i) for i in range(len(rows))]
        if len(actual) != len(expected):
            pairs = align_sequences([[1 / (1 + distance) for distance in row] for row in rows])
        names = list(expected)
        distances.append({names[i]: rows[i][j] for i, j in pairs if rows[i][j] < np.inf})
    return distances


def _compute_streams(model: Generator | EncoderModel, ids: Sequence[int]) -> dict[str, Array]:
    """Return residual streams [1, tokens, dim] in float64, keyed by layer; raise WeftError for PyTorch folders."""
    if not (graphs := open_internals(model)):
        raise WeftError(f"{model.folder} is for PyTorch, so its layers cannot be compared: leave out --layers, --plot")
    internals = graphs[-1]
    names = dict.fromkeys(name for parts in internals.streams.values() for name in parts)
    values = internals.run(make_inputs(internals.inputs, ids), names)
    streams = {
        layer: [to_array(values[name]).astype(np.float64) for name in parts]
        for layer, parts in internals.streams.items()
    }
    return {layer: sum(parts[1:], parts[0]) for layer, parts in streams.items()}


def _compute_distance(actual: Array, expected: Array) -> float:
    return float(np.linalg.norm(actual - expected) / max(float(np.linalg.norm(expected)), np.finfo(np.float64).tiny))


def measure_seconds(models: Sequence[Generator | EncoderModel], ids: Sequence[int], progress: Progress) -> list[float]:
    """Return each model's seconds per token: of a decode step, or of embedding `ids` divided by their number.

    Models alternate, so that other load on the machine affects all alike; the result is the median over rounds.
    """
    timings: list[list[float]] = [[] for _ in models]
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(_prepare_run(m, ids)) for m in models]
        for round_number in range(_ROUNDS + 1):
            for run, seconds in zip(runs, timings, strict=True):
                start = time.perf_counter()
                tokens = run()
                seconds.append((time.perf_counter() - start) / tokens)
            progress("timing", round_number + 1, _ROUNDS + 1)
    return [median(seconds[1:]) for seconds in timings]  # the first warms up


@contextlib.contextmanager
def _prepare_run(model: Generator | EncoderModel, ids: Sequence[int]) -> Iterator[Callable[[], int]]:
    """Yield a function that embeds `ids` or runs a few decode steps, to be timed; it returns the number of tokens."""
    if isinstance(model, EncoderModel):
        encoder = model
        yield lambda: len(encoder.hidden_states([ids])[0])
        return
    decoder = model.decoder
    room = decoder.max_length - 1
    # The context must have room for all rounds.
    steps = max(1, min(_STEPS, room // (_ROUNDS + 1)))
    prompt = list(ids[: max(1, min(_PROMPT, room - steps * (_ROUNDS + 1)))])
    with decoder.context(1, min(decoder.max_length, len(prompt) + steps * (_ROUNDS + 1))) as context:
        context.prefill([prompt])
        token = np.array(prompt[-1:])

        def run() -> int:
            if int(context.lengths[0]) + steps > context.capacity:
                context.prefill([prompt])
            start = time.perf_counter()
            for n_done in range(1, steps + 1):
                context.step(token)
                if time.perf_counter() - start > n_done * _LONG_STEP:
                    break
            return n_done

        yield run
