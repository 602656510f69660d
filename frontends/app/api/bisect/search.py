"""Search for the first operation whose results differ between two traces, and for its cause."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from weft.backends.alignment.traces import AlignedTrace, Operation, ValueTrace, arrange, compute_error, find_counterpart
from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes

from .hypotheses import Region, TrialChange, round_to

SECONDS = 6.0  # after which no further hypotheses are tested
LATER = 6  # pairs after one of the same name that clearly differs: two exchanged weights show in a value after both
MARGIN = 10  # times the tolerance: a row that is smaller than its operands has lost up to a digit
SHOWN = 4  # positions or features that a pattern lists
WIDEST = 4096  # features of which the rank is computed
CLEAR = ("features", "rounding", "input feature")  # kinds of patterns that leave no doubt about the cause


@dataclass(frozen=True)
class FirstDifference:
    """The first difference of two models; pairs have an entry for each model.

    values: names of the first value that differs. error: its relative error, of a row. places: the operations that
    compute it; of the model `at` (0, 1) the operation at fault. patterns: (kind, sentence) of patterns in the
    difference, the most specific first. cause: a change with which both agree.
    """

    values: tuple[str, str]
    error: float
    places: tuple[Operation, Operation]
    at: int
    patterns: list[tuple[str, str]]
    cause: TrialChange | None

    @property
    def kind(self) -> str:
        """Return the kind of the cause, else of the most specific pattern, else "other"."""
        return self.cause.kind if self.cause is not None else next((kind for kind, _ in self.patterns), "other")

    @property
    def is_explained(self) -> bool:
        """Return whether there is a cause, or a pattern that leaves no doubt."""
        return self.cause is not None or any(kind in CLEAR for kind, _ in self.patterns)

    def describe(self) -> list[str]:
        """Return sentences on how the values differ, the cause first."""
        cause, side = self.cause, "AB"[self.at]
        remedy = [] if cause is None else [f"both agree (error {cause.error:.2g}) if, in {side}, {cause.text}"]
        return [*remedy, *(text for _, text in self.patterns)]


def find_difference(traces: tuple[AlignedTrace, AlignedTrace], first: int, tolerance: float) -> FirstDifference | None:
    """Return the first difference of two aligned traces; None if all values that correspond agree, or if the outputs
    do and nothing explains a difference that is hardly above the tolerance.

    Hypotheses on trace `first` are tested before those on the other one. If none after which the outputs agree explains
    the difference of values that hardly differ or have no name in common, which may not correspond, later ones that
    depend on them are tried. If values of one name differ before the first suspect, as those that only a norm hides, a
    change of theirs is the cause if the outputs then agree.
    """
    deadline, e, o = time.monotonic() + SECONDS, traces[first], traces[1 - first]
    best: FirstDifference | None = None
    later = 0
    suspects, named = (e.find_suspects(), o.find_suspects()), e.find_first_named()
    is_first = named == next((x for x in e.trace.makers if x in {named, *suspects[0][:1]}), None)
    is_hidden = is_first and suspects[0][:1] not in ([], [named])
    if named is not None and is_hidden and not _compare_outputs(e.trace, o.trace, {}) <= tolerance:
        pair = (named, e.partners[named]) if first == 0 else (e.partners[named], named)
        difference = _describe(traces, first, pair, [named], tolerance, deadline - SECONDS / 2)
        if _repairs(traces, difference, tolerance):
            return difference
    for name, partner in _list_pairs(e, o, suspects, tolerance):
        pair = (name, partner) if first == 0 else (partner, name)
        difference = _describe(traces, first, pair, suspects[0], tolerance, deadline)
        depends = not {*suspects[0][:1]} - e.trace.find_ancestors([name], e.classes)
        if _repairs(traces, difference, MARGIN * tolerance) and (best is None or depends):
            return difference
        is_far = difference.error > MARGIN * tolerance
        is_clear = is_far and (name in e.partners or difference.is_explained)
        if best is None or (best.cause is None and depends and (is_clear or difference.cause is not None)):
            best = difference
        later += later > 0 or (is_far and name in e.partners)
        if (best.cause is None and is_clear) or later > LATER or time.monotonic() > deadline:
            break
    is_rounding = best is not None and best.cause is None and best.error <= MARGIN * tolerance
    return None if is_rounding and _compare_outputs(e.trace, o.trace, {}) <= tolerance else best


def _repairs(traces: tuple[AlignedTrace, AlignedTrace], difference: FirstDifference, tolerance: float) -> bool:
    """Return whether the outputs of both models agree after the change that is the cause of `difference`."""
    trace, reference = traces[difference.at].trace, traces[1 - difference.at].trace
    values = None if difference.cause is None else difference.cause.run(trace, trace.operations)
    return values is not None and _compare_outputs(trace, reference, values) <= tolerance


def _compare_outputs(trace: ValueTrace, reference: ValueTrace, values: Mapping[str, Array]) -> float:
    """Return the largest error of an output that both traces have, with some `values` in place of those of `trace`."""
    outputs = ((values.get(x, trace.values[x]), reference.outputs.get(name)) for name, x in trace.outputs.items())
    pairs = [arrange(x, reference.values[y]) for x, y in outputs if y is not None and x.dtype.kind == "f"]
    return max((math.inf if pair is None else compute_error(*pair) for pair in pairs), default=0.0)


def _list_pairs(
    e: AlignedTrace, o: AlignedTrace, suspects: tuple[list[str], list[str]], tolerance: float
) -> Iterator[tuple[str, str]]:
    """Yield pairs of values that differ, in order; first one that differs in some rows only, if another follows."""
    small: list[tuple[str, str]] = []
    inner = ((name, find_counterpart(e, o, name, suspects)) for name in suspects[0])
    # An output of one model may be an inner value of the other.
    outer = ((name, o.trace.outputs.get(output)) for output, name in e.trace.outputs.items())
    for name, partner in itertools.chain(inner, outer):
        pair = None if partner is None else arrange(e.trace.values[name], o.trace.values[partner])
        if partner is not None and pair is not None and not compute_error(*pair) <= tolerance:
            yield from (*small[:1], (name, partner))
            small = []
        elif partner is not None and pair is not None and not compute_error(*pair, by_row=True) <= MARGIN * tolerance:
            small.append((name, partner))


def _describe(
    traces: tuple[AlignedTrace, AlignedTrace],
    at: int,
    names: tuple[str, str],
    suspects: list[str],
    tolerance: float,
    deadline: float,
) -> FirstDifference:
    """Return the difference of the values `names`, with a cause of trace `at`, or else of the other trace."""
    x, y = (aligned.trace.values[name] for aligned, name in zip(traces, names, strict=True))
    regions, agreeing = [], traces[at].classes.keys()
    for aligned, name, expected in zip(traces, names, (y, x), strict=True):
        inside = aligned.trace.find_ancestors([name], aligned.classes) - (aligned.classes.keys() - {name})
        operations = [op for op in aligned.trace.operations if not inside.isdisjoint(op.makes)]
        regions.append(Region(aligned.trace, operations, name, expected))
    places = [next((op for op in r.operations[::-1] if not _is_view(op, r.trace)), r.operations[-1]) for r in regions]
    # The first suspect that depends on the inputs, of those with weights if there are any.
    candidates = [op for op in regions[at].operations if not {*op.makes}.isdisjoint(suspects)]
    candidates = [op for op in candidates if not agreeing.isdisjoint(op.reads)]
    weighted = (op for op in candidates if not traces[at].trace.constants.keys().isdisjoint(op.reads))
    places[at] = next(itertools.chain(weighted, candidates), places[at])
    pair, cause = arrange(x, y), None
    patterns = [] if pair is None else list(list_patterns(*pair, tolerance))
    error = math.inf if pair is None else compute_error(*pair, by_row=True)
    for i in (at,) if any(kind in CLEAR for kind, _ in patterns) else (at, 1 - at):
        if (cause := regions[i].find_cause(tolerance, deadline, regions[1 - i])) is not None:
            break
    else:
        kind = next((kind for kind, _ in patterns), "weight")
        end = max(deadline, time.monotonic() + SECONDS / 6)
        replacements = (regions[i].find_other_weight(kind, tolerance, end, regions[1 - i]) for i in (at, 1 - at))
        cause = next(filter(None, replacements), None)
    if cause is not None:
        at = next(i for i in (0, 1) if cause.operation in regions[i].operations)
        places[at] = cause.operation
    return FirstDifference(names, error, (places[0], places[1]), at, patterns, cause)


def _is_view(op: Operation, trace: ValueTrace) -> bool:
    """Return whether a result of `op` has the elements of an operand."""
    elements = {x: np.sort(trace.values[x], None) for x in (*op.reads, *op.makes) if x in trace.values}
    pairs = [(elements[x], elements[y]) for x in op.reads for y in op.makes if x in elements and y in elements]
    return any(np.array_equal(*pair) for pair in pairs)


@np.errstate(all="ignore")
def list_patterns(x: Array, y: Array, tolerance: float) -> Iterator[tuple[str, str]]:
    """Yield (kind, sentence) for patterns in the difference of x and y [..., features], the most specific first."""
    x, y = (v.reshape(-1, v.shape[-1]).astype(np.float64) for v in (x, y))
    differs = ~(np.abs(x - y) <= tolerance * np.abs(y).max(1, keepdims=True))
    for kind, axis in (("positions", 1), ("features", 0)):
        at, count = np.flatnonzero(differs.any(axis)).tolist(), x.shape[1 - axis]
        if 0 < len(at) < (count if axis else count // 2 + 1):
            tail = axis and at == list(range(at[0], count))
            where = f"from {at[0]} on" if tail else ", ".join(map(str, at[:SHOWN])) + "…" * (len(at) > SHOWN)
            yield kind, f"they differ only at the {kind} {where}, of {count}"
    for dtype in (dtypes.bf16, dtypes.f16):
        if x.any() and y.any() and (round_to(x, dtype) == x).all() != (round_to(y, dtype) == y).all():
            yield "rounding", f"the elements of one are all in {dtype.name}"
            break
    z, size = y - x, tolerance * np.abs(y).max()
    varies = all((np.ptp(z, axis) > size).sum() > 1 for axis in (0, 1)) and bool(np.isfinite(z).all())
    if varies and 2 < min(x.shape) <= max(x.shape) <= WIDEST:
        first, second, *_ = np.linalg.svd(z, compute_uv=False)
        if second <= size * math.sqrt(x.size) <= first / MARGIN:
            yield "input feature", "the difference has rank one, as if one column of a weight differed"
    scales = (x * y).sum(0) / np.maximum((x * x).sum(0), np.finfo(np.float64).tiny)
    if len(x) > 1 and compute_error(x * scales, y) <= tolerance:
        yield "feature factors", "each feature differs by its own factor, as for other weights of a norm"
    if compute_error(np.sort(x), np.sort(y)) <= tolerance:
        yield "permuted features", "the features are permuted"
