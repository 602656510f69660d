"""Hypotheses on a difference, tested by running the operations of one model again with one thing changed."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from weft.backends.alignment.traces import Operation, ValueTrace, arrange, compute_error
from weft.ir.ops.activation import ACTIVATIONS
from weft.ir.recipes.readers import Array
from weft.ir.schema.visible_keys import PATTERNS
from weft.ir.types import dtypes

GELUS = ("none", "tanh", "sigmoid")  # approximations
CHOICES = (tuple(ACTIVATIONS), GELUS, ("softmax", "sigmoid"), ("rms", "layer"), PATTERNS)
FLAGS, COUNTS = ("interleaved", "causal", "unidirectional", "normalize"), ("k", "stride", "summary", "keep_first")
OPTIONAL = ("scale", "cap", "limit")  # words in the names of float attributes that may be None
EPS = [10.0**-n for n in range(3, 13)]
THETAS = (1e3, 1e4, 5e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
SMALL = 64  # largest axis that is reversed
RECENT = 40  # values of the same shape before an operation, which it might read by mistake
FEW, MOST = 4, 32  # heads of which all permutations are tried, or some


@dataclass(frozen=True)
class TrialChange:
    """A change of the operations `by`: other `attrs`, or other `arrays` for names that they read.

    `kind` has one or two words. `operation`: the one at fault; `by` () means it alone. `results`: values in place of
    computed ones. `error`: the error of the target after the change, once it has been tested.
    """

    kind: str
    text: str
    operation: Operation
    by: tuple[Operation, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    results: Mapping[str, Array] = field(default_factory=dict)
    error: float = math.inf

    @np.errstate(all="ignore")
    def run(self, trace: ValueTrace, operations: Iterable[Operation]) -> dict[str, Array] | None:
        """Return the results of `operations` that this change affects, by name; None if one cannot run."""
        env, changed = dict(self.results), self.by or (self.operation,)
        for op in operations:
            is_changed = op in changed and not self.results
            if env.keys().isdisjoint(op.makes) and (is_changed or any(x in env for x in op.reads)):
                arrays = {**env, **self.arrays} if is_changed else env
                operands = [arrays[x] if x in arrays else trace.load(x) for x in op.reads]
                try:
                    results = op.run(operands, {**op.attrs, **self.attrs} if is_changed else op.attrs)
                except Exception:  # an operation may refuse operands or attributes that it was not built for
                    return None
                env |= {name: x for name, x in zip(op.makes, results, strict=False) if name}
        return env


@dataclass
class Region:
    """The operations of a trace from values that agree with another trace to the value `target`, which is `expected`
    there."""

    trace: ValueTrace
    operations: Sequence[Operation]
    target: str
    expected: Array

    @cached_property
    def sizes(self) -> list[int]:
        """Return the numbers of heads in the model, and the widths of heads in this region."""
        heads = {v for op in self.trace.operations for k, v in op.attrs.items() if "heads" in k and isinstance(v, int)}
        width = np.atleast_1d(self.trace.values[self.target]).shape[-1]
        return sorted({n for h in heads if h and width % h == 0 for n in (h, width // h)} - {1})

    @cached_property
    def makers(self) -> dict[str, Operation]:
        """Return the operation of this region that computes each value."""
        return {x: op for op in self.operations for x in op.makes if x}

    @np.errstate(all="ignore")
    def compute_error(self, change: TrialChange) -> float:
        """Return the largest relative error of a row of the target after `change`; infinite if it cannot run."""
        actual = (change.run(self.trace, self.operations) or {}).get(self.target, np.empty(0))
        pair = arrange(actual, self.expected) if actual.size == self.trace.values[self.target].size else None
        error = math.inf if pair is None else compute_error(*pair, by_row=True)
        return math.inf if math.isnan(error) else error

    @np.errstate(all="ignore")
    def find_cause(self, tolerance: float, deadline: float, other: Region) -> TrialChange | None:
        """Return the change that makes the target agree; of several, that with the smallest error, the first if near.

        Attributes may have the values of attributes in the region `other`, of the other model. No hypothesis is tested
        after the `deadline`, in seconds of `time.monotonic`.
        """
        best: TrialChange | None = None
        attributes = {v for op in other.operations for v in op.attrs.values() if isinstance(v, float)}
        candidates = sorted(v for v in attributes if v > 0)  # ONNX Runtime aborts at some negative ones
        floats = {name for name, x in self.trace.values.items() if x.dtype.kind == "f"}
        operations = [op for op in reversed(self.operations) if not floats.isdisjoint(op.makes)]
        for list_changes, op in itertools.product(HYPOTHESES, operations):
            if best is not None and op is operations[0]:
                break  # cheaper changes explain it
            for change in list_changes(self, op, candidates):
                error = self.compute_error(change)
                if error <= tolerance and (best is None or 4 * error < best.error):
                    best = replace(change, error=error)
                if time.monotonic() > deadline:
                    return best
        return best

    def find_other_weight(self, kind: str, tolerance: float, deadline: float, other: Region) -> TrialChange | None:
        """Return the replacement of a constant by one of the region `other` that makes the target agree."""
        theirs = dict.fromkeys(y for op in other.operations for y in op.reads if y in other.trace.constants)
        reads = [(op, x) for op in self.operations for x in op.reads if x in self.trace.constants]
        for (op, x), y in itertools.product(reads, theirs):
            shape, size = self.trace.constants[x][0], other.trace.constants[y][0]
            if size not in (shape, shape[::-1]) or time.monotonic() > deadline or (w := other.trace.load(y)) is None:
                continue
            readers, arrays = tuple(o for o in self.operations if x in o.reads), {x: w if size == shape else w.T}
            change = TrialChange(kind, f"{x} is {y} of the other model", op, readers, arrays=arrays)
            if (error := self.compute_error(change)) <= tolerance:
                return replace(change, error=error)
        return None


def _list_attributes(region: Region, op: Operation, candidates: list[float]) -> Iterator[TrialChange]:
    for name, value in op.attrs.items():
        alike = tuple(o for o in region.operations if o.op == op.op and o.attrs.get(name) == value)
        shape = next((region.trace.values[x].shape for x in op.makes if x in region.trace.values), ())
        for choice in _list_alternatives(op, name, value, shape, candidates):
            text = value.decode() if isinstance(value, bytes) else value
            new, old = (f"{v:.6g}" if isinstance(v, float) else str(v) for v in (choice, text))
            for by in {(op,): 0, alike: 0}:
                yield TrialChange(name, f"{name} is {new} instead of {old}", op, by, attrs={name: choice})


def _list_alternatives(
    op: Operation, name: str, value: Any, shape: tuple[int, ...], candidates: list[float]
) -> list[Any]:
    """Return alternatives to the `value` of an attribute of `op`, whose result has the `shape`."""
    text = value.decode() if isinstance(value, bytes) else value
    if isinstance(value, bool) or (value in (0, 1) and any(word in name for word in FLAGS)):
        return [type(value)(not value)]
    if isinstance(text, str):
        groups = (group for group in CHOICES if text in group and (name == "approximate") == (group is GELUS))
        return [choice for group in groups for choice in group if choice != text]
    if "window" in name:
        none = -1 if isinstance(value, int) and value < 0 else None
        return [n for n in (none, *range(1, max(shape, default=1) + 1)) if n != value]
    if isinstance(value, int):
        return [value - 1, value + 1] if name in COUNTS else []
    if not isinstance(value, float) and not (value is None and any(word in name for word in OPTIONAL)):
        return []
    heads = {v for k, v in op.attrs.items() if "heads" in k and isinstance(v, int) and v}
    widths = {*heads, *shape[-1:], *(n // h for n in shape[-1:] for h in heads)} - {0, 1}
    factors = [f for n in sorted(widths) for f in (n, 1 / n, math.sqrt(n), 1 / math.sqrt(n))]
    usual = EPS if "eps" in name else [value * f for f in (*factors, 2.0, 0.5)] if value else factors
    return [x for x in dict.fromkeys([*candidates, *usual, 1.0, None]) if x != value]


def _list_exchanges(region: Region, op: Operation, _: Any) -> Iterator[TrialChange]:
    """Yield exchanges of two values or constants that `op` or an operation after it reads, in all that read them."""
    names = dict.fromkeys(x for o in region.operations for x in o.reads if x and x not in region.makers)
    for a, b in itertools.combinations(names, 2):
        x, y = region.trace.load(a), region.trace.load(b)
        readers = tuple(o for o in region.operations if a in o.reads or b in o.reads)
        if readers[0] is op and x is not None and y is not None and _is_like(x, y):
            yield TrialChange("exchanged operands", f"{a} and {b} are exchanged", op, readers, arrays={a: y, b: x})


def _list_operands(region: Region, op: Operation, _: Any) -> Iterator[TrialChange]:
    """Yield missing, shifted and permuted operands of `op`; and leave out `op`, or an operation before it."""
    values = region.trace.values
    made, result = next((x, values[x]) for x in op.makes if x in values)
    for name in dict.fromkeys(op.reads):
        x, maker = region.trace.load(name), region.makers.get(name, op)
        if x is not None and x.dtype.kind == "f" and (name in values or x.ndim == 1):
            kind = "missing operand" if name in values else "missing bias"
            yield TrialChange(kind, f"{name} is 0", op, arrays={name: np.zeros_like(x)})
        if x is None or name not in values:
            continue
        if _is_like(x, result):
            yield TrialChange("missing operation", f"the {op.op} of {op.name} is left out", op, results={made: x})
        inputs = region.trace.find_ancestors([name], values.keys() - region.makers.keys()) - {name}
        for y in (y for y in values if maker is not op and y in inputs and _is_like(values[y], x)):
            text = f"the {maker.op} of {maker.name} is left out"
            yield TrialChange("missing operation", text, maker, (op,), arrays={name: values[y]})
        if x.dtype.kind == "f":
            yield TrialChange("sign", f"{name} is negated", op, arrays={name: -x})
            for kind, text, moved in permute_heads(x, region.sizes):
                yield TrialChange(kind, f"{text} of {name}", maker, (op,), arrays={name: moved})
        elif x.ndim and x.dtype in (np.int32, np.int64):
            for by in (1, -1):
                yield TrialChange("offset", f"{name} is shifted by {by:+d}", op, arrays={name: np.maximum(x + by, 0)})
            for text, at in (("first", 0), ("last", x.shape[-1] - 1)):
                masked = np.where(np.arange(x.shape[-1]) == at, 0, x).astype(x.dtype)
                yield TrialChange("mask", f"the {text} element of {name} is 0", op, arrays={name: masked})


def _list_constants(region: Region, op: Operation, _: Any) -> Iterator[TrialChange]:
    for name in dict.fromkeys(x for x in op.reads if x in region.trace.constants):
        w, readers = region.trace.load(name), tuple(o for o in region.operations if name in o.reads)
        if w is not None and w.dtype.kind == "f":
            variants = itertools.chain(_list_multiples(region, op, name, w), _list_variants(region, name, w))
            for kind, text, variant in variants:
                yield TrialChange(kind, f"{name} is {text}", op, readers, arrays={name: variant.astype(w.dtype)})


def _list_variants(region: Region, name: str, w: Array) -> Iterator[tuple[str, str, Array]]:
    """Yield (kind, text, array) for contents that the constant `name` may have by mistake."""
    if w.ndim == 2 and w.shape[0] == w.shape[1]:
        yield "transposed", "transposed", w.T
    yield from (("rounding", f"rounded to {text}", rounded) for text, rounded in list_roundings(w))
    if w.ndim == 1:
        yield from (("offset of 1", f"changed by {by:+d}", w + by) for by in (1, -1))
        if w.size > 1 and w[-1] > 0 and (np.diff(w) < 0).all():  # RoPE frequencies
            for theta in THETAS if w[0] == 1 else ():
                yield "theta", f"of the base {theta:g}", theta ** -(np.arange(w.size) / w.size)
            yield from (("rope scaling", f"times {2.0**k:g}", w * 2.0**k) for k in range(-6, 7) if k)
    for axis in range(w.ndim):
        for kind, text, moved in permute_heads(np.moveaxis(w, axis, -1), region.sizes if w.ndim == 2 else ()):
            yield kind, f"that with {text} along axis {axis}", np.moveaxis(moved, -1, axis)
        if 1 < w.shape[axis] <= SMALL:
            yield "reversed", f"in reverse order along axis {axis}", np.flip(w, axis)
            yield "shifted", f"shifted by one along axis {axis}", np.roll(w, 1, axis)
    yield "sign", "negated", -w
    for constant, (shape, _) in region.trace.constants.items():
        if constant != name and shape in (w.shape, w.shape[::-1]) and (y := region.trace.load(constant)) is not None:
            yield "other weight", f"{constant} instead", y if shape == w.shape else y.T


def _list_multiples(region: Region, op: Operation, name: str, w: Array) -> Iterator[tuple[str, str, Array]]:
    """Yield the best multiple of the constant `name`, if `op` computes the target as a linear function of it."""
    value, expected = region.trace.values[region.target], region.expected
    without = TrialChange("factor", "", op, arrays={name: np.zeros_like(w)}).run(region.trace, [op])
    if region.target in op.makes and without and value.squeeze().shape == expected.squeeze().shape and w.size > 1:
        rest = without[region.target].astype(np.float64)
        x, y = value - rest, expected.reshape(value.shape) - rest
        factor = float(np.vdot(x, y)) / max(float(np.vdot(x, x)), np.finfo(np.float64).tiny)
        yield "factor", f"multiplied by {name_factor(factor, region.sizes)}", w * factor


def _list_mistaken_operands(region: Region, op: Operation, _: Any) -> Iterator[TrialChange]:
    values = region.trace.values
    earlier = list(itertools.takewhile(lambda x: x not in op.makes, values))
    for name in (x for x in op.reads if x in values and values[x].dtype.kind == "f"):
        for mistaken in [y for y in earlier if y != name and _is_like(values[y], values[name])][-RECENT:]:
            text = f"it reads {mistaken} instead of {name}"
            yield TrialChange("other operand", text, op, arrays={name: values[mistaken]})


def _list_results(region: Region, op: Operation, _: Any) -> Iterator[TrialChange]:
    """Yield simple functions of the target, if `op` computes it."""
    target, value = region.target, region.trace.values[region.target]
    pair = arrange(value, region.expected) if target in op.makes and value.dtype.kind == "f" else None
    if pair is None:
        return
    x, y = (v.reshape(-1, v.shape[-1]).astype(np.float64) for v in pair)
    factor = float(np.vdot(x, y)) / max(float(np.vdot(x, x)), np.finfo(np.float64).tiny)
    functions = [("factor", f"{target} is multiplied by {name_factor(factor, region.sizes)}", factor * x)]
    functions += [(kind, f"{target} has {text}", z) for kind, text, z in permute_heads(x, region.sizes)]
    if len(x) > 1:
        functions.append(("bias", f"one vector is added to all positions of {target}", x + (y - x).mean(0)))
        ratio = y / x
        norm = x * ratio[:, :1] * (ratio[:1] / ratio[0, 0])  # of ratios of single elements, which lose digits
        if x.shape[1] > 1 and ratio[:, 0].all() and np.ptp(ratio[:, 0]) > 1e-3 * abs(ratio[0, 0]):
            functions.append(("norm", f"each position of {target} is multiplied by its own factor, as by a norm", norm))
    for kind, text, z in functions:
        yield TrialChange(kind, text, op, results={target: z.reshape(pair[0].shape)})


HYPOTHESES = (
    _list_attributes,
    _list_exchanges,
    _list_operands,
    _list_constants,
    _list_mistaken_operands,
    _list_results,
)


def _is_like(x: Array, y: Array) -> bool:
    return bool(x.shape == y.shape and x.dtype == y.dtype)


def permute_heads(x: Array, sizes: Iterable[int]) -> Iterator[tuple[str, str, Array]]:
    """Yield (kind, text, x) with heads along the last axis in another order, and with another RoPE layout.

    `sizes`: the numbers of heads.
    """
    for n in (n for n in sizes if 1 < n <= MOST and x.shape[-1] % n == 0):
        blocks, heads = x.reshape(*x.shape[:-1], n, -1), np.arange(n)
        orders = [heads[::-1], *(np.roll(heads, k) for k in range(1, n)), *([heads ^ 1] if n % 2 == 0 else [])]
        orders += [np.where(heads == i, j, np.where(heads == j, i, heads)) for i in range(n) for j in range(i)]
        for order in itertools.permutations(heads.tolist()) if n <= FEW else (order.tolist() for order in orders):
            yield "permuted heads", f"heads {[*order]}", blocks[..., [*order], :].reshape(x.shape)
        for text, shape in (("interleaved halves", (2, -1)), ("separated pairs", (-1, 2))):
            if blocks.shape[-1] % 2 == 0:
                moved = blocks.reshape(*blocks.shape[:-1], *shape).swapaxes(-1, -2)
                yield "interleaved", f"{text} of {n} heads", moved.reshape(x.shape)


def name_factor(factor: float, sizes: Iterable[int]) -> str:
    """Return `factor` as a number, with its meaning if it is a simple function of one of `sizes`."""
    names = {f: text for n in sizes for f, text in ((1 / n, f"1/{n}"), (n**0.5, f"√{n}"), (n**-0.5, f"1/√{n}"))}
    return f"{factor:.6g}" + next(
        (f" = {text}" for f, text in names.items() if math.isclose(f, factor, rel_tol=1e-4)), ""
    )


@np.errstate(over="ignore")
def round_to(x: Array, dtype: dtypes.DType) -> Array:
    """Return `x`, in its own dtype, rounded to `dtype`."""
    return np.asarray(x.astype(dtype.numpy).astype(x.dtype))


def list_roundings(x: Array) -> Iterator[tuple[str, Array]]:
    """Yield (name, `x` rounded to this form) for 16-bit floats and for integers of 8 bits with one scale per group."""
    yield from ((dtype.name, round_to(x, dtype)) for dtype in (dtypes.bf16, dtypes.f16))
    groups = [("matrix", x.reshape(1, -1), -1), ("row", x, -1), ("column", x, 0)]
    groups += [(f"group of {n}", x.reshape(-1, n), -1) for n in (32, 64, 128) if x.size % n == 0]
    for name, group, axis in groups:
        scale = np.maximum(np.abs(group).max(axis, keepdims=True), np.finfo(np.float32).tiny) / 127
        yield f"int8 with a scale per {name}", (np.round(group / scale) * scale).reshape(x.shape)
