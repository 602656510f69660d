"""Sampling of the next token from logits, in numpy, with the semantics and order of Hugging Face's processors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError
from weft.ir.storage.documents import Record

from ..arrays import Floats, Ints

# Options whose defaults a checkpoint may specify, and their types.
DEFAULTS = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float}
_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
MAX_GAP = 80.0  # tokens whose score is further below the largest cannot follow: e^-80 is below float32 precision
_MAX_SCORE = 1e30  # scores whose differences might overflow
_MAX_BIAS = 1e6  # largest bias or penalty of a logit


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None


@dataclass(frozen=True)
class Sampling:
    """Options of sampling the next token; the default is greedy.

    Applied in this order: repetition penalty (Keskar et al. 2019, arXiv 1909.05858), frequency and presence penalty and
    logit bias, temperature, top-k, top-p (Holtzman et al. 2019, arXiv 1904.09751), min-p (Nguyen et al. 2024, arXiv
    2407.01082). Temperature 0 takes the most likely token; the three filters then have no effect. The logit of a token
    drawn n times decreases by n · `frequency_penalty`, and by `presence_penalty` if n > 0; prompt tokens do not count.
    `logit_bias` is added to the logits of tokens. Row r of a batch draws from its own generator, seeded with
    `seed + r`, so its tokens do not depend on other rows; without a seed the draws differ each time.

    Raises WeftError on a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        bounded = f"between -{_MAX_BIAS:g} and {_MAX_BIAS:g}"
        for field in fields(self):
            if field.name != "logit_bias":
                self._check_number(field.name, getattr(self, field.name))
        for token, bias in (self.logit_bias or {}).items():
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or token < 0:
                raise WeftError(f"logit_bias names {token!r}, but its keys must be token ids")
            self._check_number("logit_bias", bias)
            if abs(bias) > _MAX_BIAS:
                raise WeftError(f"logit_bias is {bias} for token {token}, but it must be {bounded}")
        in_range = {
            "temperature": (self.temperature >= 0, "at least 0 (0 is greedy)"),
            "top_k": (self.top_k >= 0, "at least 0 (0 is off)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0 (1 is off)"),
            "frequency_penalty": (abs(self.frequency_penalty) <= _MAX_BIAS, bounded),
            "presence_penalty": (abs(self.presence_penalty) <= _MAX_BIAS, bounded),
            "seed": (self.seed is None or self.seed >= 0, "at least 0"),
        }
        for name, (good, expected) in in_range.items():
            if not good:
                raise WeftError(f"{name} is {getattr(self, name)}, but it must be {expected}")

    @classmethod
    def from_options(cls, **options: Unpack[SamplingOptions]) -> Sampling:
        """Return a `Sampling` with `options`. Raises WeftError on a value outside its range, and on a filter or seed at
        temperature 0, which would have no effect."""
        sampling = cls(**options)
        for name in ("top_k", "top_p", "min_p", "seed"):
            value = getattr(sampling, name)
            if sampling.temperature == 0 and value != getattr(cls, name):
                raise WeftError(
                    f"{name} is {value}, but nothing is sampled at temperature 0: give a temperature above 0, or leave "
                    f"out {name}"
                )
        return sampling

    @property
    def has_adjustments(self) -> bool:
        """Return whether penalties or a bias change the logits before the temperature."""
        return self.repetition_penalty != 1 or self.has_count_penalties or bool(self.logit_bias)

    @property
    def has_count_penalties(self) -> bool:
        """Return whether a penalty depends on the number of times that a token was drawn."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    @staticmethod
    def _check_number(name: str, value: Any) -> None:
        if name == "seed" and value is None:
            return
        is_integer = name in ("top_k", "seed")
        kinds = (int, np.integer) if is_integer else (int, float, np.integer, np.floating)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            raise WeftError(f"{name} is {value!r}, but it must be a {'whole' if is_integer else 'finite'} number")


def read_sampling_defaults(metadata: Record, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the options in `DEFAULTS` that `metadata` sets (top_k −1 counts as unset). `names` maps options to keys of
    `metadata` that differ from the option's name. Raises WeftError on a value of the wrong type or outside its range.
    """
    options = {name: metadata.get((names or {}).get(name, name), kind, None) for name, kind in DEFAULTS.items()}
    options = {name: value for name, value in options.items() if value is not None and (name, value) != ("top_k", -1)}
    try:
        Sampling(**options)
    except WeftError as error:
        raise WeftError(f"{metadata.source}: {error}") from error
    return options


@dataclass(frozen=True)
class TokenRules:
    """Rules that restrict the tokens of an answer, regardless of the logits.

    - begin: the allowed tokens at each of the first positions
    - last: the only token allowed at the length limit, even where another rule applies; None: any
    - never: tokens not allowed at any position after those of `begin`
    - never_first: tokens not allowed at the first position after those of `begin`
    """

    begin: tuple[tuple[int, ...], ...] = ()
    last: int | None = None
    never: tuple[int, ...] = ()
    never_first: tuple[int, ...] = ()

    def __call__(self, scores: Floats, count: int, limit: int) -> Floats:
        """Return `scores` [..., vocab] with minus infinity for each token not allowed as token `count` (from 0) of an
        answer of at most `limit` tokens; `scores` itself if all are. A token that is allowed alone gets the score 0."""
        if count == limit - 1 and self.last is not None:
            return _mask_except(scores, (self.last,))
        if count < len(self.begin):
            return _mask_except(scores, self.begin[count])
        hidden = [*self.never, *(self.never_first if count == len(self.begin) else ())]
        if not hidden:
            return scores
        scores = scores.copy()
        scores[..., hidden] = -np.inf
        return scores


def _mask_except(scores: Floats, tokens: tuple[int, ...]) -> Floats:
    """Return `scores` with minus infinity except at `tokens`; a single token gets the score 0."""
    masked = np.full_like(scores, -np.inf)
    masked[..., tokens] = scores[..., tokens] if len(tokens) > 1 else 0
    return masked


class Sampler:
    """The sampler of one batch row; the index `row` is added to the seed. If penalties are set, it tracks the tokens of
    the `prompt` and the tokens drawn."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], row: int = 0) -> None:
        self.sampling = sampling
        self._rng = np.random.default_rng(None if sampling.seed is None else sampling.seed + row)
        self._used_tokens = set(prompt) if sampling.repetition_penalty != 1 else None
        self._drawn_counts: Counter[int] | None = Counter() if sampling.has_count_penalties else None

    def __call__(self, logits: Floats) -> int:
        """Return the next token, drawn from `logits` [vocab] in float32, which stay unchanged. Raises WeftError when
        the largest logit is NaN or infinite."""
        token = int(logits.argmax())  # argmax returns a NaN if there is one
        check_logits(logits[token])
        if self.sampling.temperature > 0:
            token = self._draw(*self.filter_candidates(logits))
        elif self.sampling.has_adjustments:
            token = int(self._adjust(logits.copy()).argmax())
        if self._used_tokens is not None:
            self._used_tokens.add(token)
        if self._drawn_counts is not None:
            self._drawn_counts[token] += 1
        return token

    def draw_uniforms(self, count: int) -> NDArray[np.float64]:
        """Draw `count` uniform random numbers in [0, 1) from this row's generator and return them."""
        return self._rng.random(count)

    def filter_candidates(self, logits: Floats) -> tuple[Ints, Floats]:
        """Return the ids and the processed scores, both [n], of the tokens of `logits` [vocab] that pass top-k, top-p
        and min-p; at temperature 0 those of the likeliest token only."""
        s = self.sampling
        if s.has_adjustments:
            logits = self._adjust(logits.copy())
        if s.temperature == 0:
            best: Ints = logits.argmax(axis=-1, keepdims=True)
            return best, logits[best]
        scores = logits if s.temperature == 1 else _apply_temperature(logits, s.temperature)
        ids: Ints = np.arange(scores.size)
        if 0 < s.top_k < scores.size:
            # Keep ties with the k-th, as Hugging Face does.
            ids = np.flatnonzero(scores >= np.partition(scores, -s.top_k)[-s.top_k])
            scores = scores[ids]
        if s.top_p < 1:
            nucleus = _select_nucleus(scores, s.top_p)
            ids, scores = ids[nucleus], scores[nucleus]
        if s.min_p > 0:
            p = _softmax(scores)
            likely = np.flatnonzero(p >= s.min_p * p.max())
            ids, scores = ids[likely], scores[likely]
        return ids, scores

    def _adjust(self, logits: Floats) -> Floats:
        """Apply penalties and bias to `logits` [vocab] in place, and return `logits`."""
        s = self.sampling
        if self._used_tokens:
            seen = np.fromiter((i for i in self._used_tokens if i < logits.size), np.int64)
            old = logits[seen]
            penalty = _float32(s.repetition_penalty)
            # A tiny penalty yields ∞, and ∞ − ∞ in the softmax is NaN: hence the clip.
            with np.errstate(over="ignore"):
                logits[seen] = np.clip(np.where(old < 0, old * penalty, old / penalty), None, _HUGE)
        if self._drawn_counts:
            tokens = np.fromiter(self._drawn_counts, np.int64)
            times = np.fromiter(self._drawn_counts.values(), np.float32)
            logits[tokens] -= times * np.float32(s.frequency_penalty) + np.float32(s.presence_penalty)
        for token, bias in (s.logit_bias or {}).items():
            if token < logits.size:
                logits[token] += np.float32(bias)
        return logits

    def _draw(self, ids: Ints, scores: Floats) -> int:
        p = _softmax(scores)
        if np.count_nonzero(scores > scores.max() - MAX_GAP) == 1:  # only one token can follow: draw no random number
            return int(ids[p.argmax()])
        # f64: in a vocabulary of 100,000 an f32 sum would swallow small probabilities. Rounded, they do not sum to 1.
        total = np.cumsum(p, dtype=np.float64)
        at = np.searchsorted(total, self._rng.random() * total[-1], side="right")
        # Rounding may make the product equal to the sum.
        return int(ids[min(at, ids.size - 1)])


def check_logits(largest: Floats | np.float32) -> None:
    """Check that `largest`, the largest logit of each row, is finite. Raises WeftError if one is NaN or infinite."""
    if not np.isfinite(largest).all():
        wrong = np.ravel(largest)[~np.isfinite(np.ravel(largest))][0]
        raise WeftError(
            f"the model computed {wrong} as its largest logit, so no token can be chosen: the dtype it was "
            "compiled in may overflow (try bf16 or f32), or its weights are broken"
        )


def check_count(name: str, value: object) -> None:
    """Check that `value` is an integer of at least 1. Raises WeftError that calls the value `name` if not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WeftError(f"{name} is {value!r}, but it must be a whole number of at least 1")


def _float32(number: float) -> np.float32:
    """Return the positive `number` as float32, clamped to the range of normal finite values."""
    return np.float32(min(max(number, _TINY), _HUGE))


def _apply_temperature(logits: Floats, temperature: float) -> Floats:
    """Return `logits` / `temperature`, with the largest shifted to 0 before if the quotient might overflow."""
    divisor = _float32(temperature)
    with np.errstate(over="ignore"):
        scores: Floats = logits / divisor
        if not abs(scores.max()) < _MAX_SCORE:
            scores = (logits - logits.max()) / divisor
    return scores


def _softmax(scores: Floats) -> Floats:
    p: Floats = np.exp(scores - scores.max())
    p /= p.sum()
    return p


def _select_nucleus(scores: Floats, top_p: float) -> Ints:
    """Return, in ascending order, the indices of the smallest set of likeliest tokens whose probabilities sum to at
    least `top_p`. Of equally likely tokens the first are selected. Only tokens with probability (1 - top_p) / size or
    more are sorted: all others together have less than 1 - top_p, so none of them is selected."""
    p = _softmax(scores)
    # The likeliest token always stays, even if rounding puts the bound above it.
    candidates = np.flatnonzero(p >= min((1 - top_p) / p.size, p.max()))
    ranked = candidates[np.argsort(-scores[candidates], kind="stable")]
    above = np.cumsum(p[ranked], dtype=np.float64) - p[ranked]
    selected = above < max(top_p, _TINY) * p.sum(dtype=np.float64)
    return np.sort(ranked[selected])
