"""Generate a Triton kernel that computes one token of a user-defined recurrence, from the graph of its step.

The states of a batch row are cut into blocks. At most one axis of the states is reduced, and a block contains all of
it: so it is independent of other blocks and may update states in place. Values are tiles [other axes, reduced axis],
or [other axes] without a reduction, with a size of 1 where they do not vary.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.ir import ops
from weft.ir.graph import Node, Value
from weft.ir.graph.step import BATCH, Step
from weft.ir.op import Op
from weft.passes.analysis.feed_forward import find_activation_name

from ...kernels.shared.operands import power_of_2
from .scan_parts import Axis, StepAxes, find_reduced_dims, is_regrouping
from .step_linear import find_kernel_activation

MAX_ELEMENTS = 4096  # elements of a state in a block
MAX_ROWS, MAX_REDUCED_ROWS = 128, 32  # most rows of a block, without and with a reduction
_SIGNS = {
    **{"add": "+", "sub": "-", "mul": "*", "div": "/", "equal": "==", "less": "<", "less_equal": "<="},
    **{"logical_and": "&", "logical_or": "|"},
}
TEXTS = {
    **{name: f"{{0}} {sign} {{1}}" for name, sign in _SIGNS.items()},
    **{name: f"tl.{name}({{0}})" for name in ("abs", "ceil", "cos", "erf", "exp", "floor", "log")},
    **{name: f"tl.{name}({{0}})" for name in ("rsqrt", "sigmoid", "sin", "sqrt")},
    **{name: f"tl.{name}({{0}}, {{1}})" for name in ("maximum", "minimum")},
    **{"neg": "-{0}", "logical_not": "{0} == 0", "where": "tl.where({0}, {1}, {2})", "reciprocal": "1.0 / {0}"},
    **{"square": "{0} * {0}", "relu": "tl.maximum({0}, 0.0)", "softplus": "softplus({0})"},
}
REDUCED = {  # reductions of a tile: the value of masked elements, and the function
    ops.sum: ("0.0", "tl.sum"),
    ops.mean: ("0.0", "tl.sum"),
    ops.max: ('-float("inf")', "tl.max"),
    ops.min: ('float("inf")', "tl.min"),
}
MOVES = (ops.reshape, ops.squeeze, ops.unsqueeze, ops.transpose, ops.expand)  # ops that leave a tile as it is
# Names that no variable of a kernel may have: its functions and indices.
RESERVED = {
    *("tl", "start_next", "wait_for_previous", "activate", "softplus", "float", "row", "there", "known", "p", "n"),
    *("BLOCK", "PDL"),
}


class NoKernel(Exception):
    """Raised for a step that no kernel can be generated for; the message is the reason, in a few words."""


@dataclass(frozen=True)
class ScanKernel:
    """A generated kernel for one token of a recurrence. text: its source, with ``{name}`` for its name. count: number
    of positions per batch row in those axes of the states that are not reduced. block: number of these positions that a
    program computes. outputs: shape of each output without batch."""

    text: str
    count: int
    block: int
    outputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _View:
    """A strided view of the input `name` within a batch row; `strides` are in elements, 0 where broadcast."""

    name: str
    strides: tuple[int, ...]


def _find_row_shape(value: Value) -> tuple[int, ...]:
    """Return the shape of `value` with 1 for the batch; raise NoKernel for other symbolic sizes."""
    if any(not isinstance(n, int) and n != BATCH for n in value.shape):
        raise NoKernel(f"{value.name} mixes batch rows")
    return tuple(n if isinstance(n, int) else 1 for n in value.shape)


def _compute_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of this shape; 0 for sizes of 1."""
    return tuple(0 if n == 1 else math.prod(shape[d + 1 :]) for d, n in enumerate(shape))


def _format_number(x: float) -> str:
    return repr(float(x)) if math.isfinite(x) else f'float("{x!r}")'


class ScanKernelWriter:
    """Writes the kernel that computes one token of `step`, one line for each of its nodes. The constructor and `write`
    raise NoKernel with the reason, such as an op that is neither elementwise nor reduces an axis of the states."""

    def __init__(self, step: Step) -> None:
        self.step, self.graph, self.axes = step, step.graph, StepAxes(step)
        self.loads: list[str] = []
        self.lines: list[str] = []
        self.names = {*RESERVED}
        self.variables: dict[Value, str] = {}
        self.loaded: dict[str, str] = {}  # the variable loaded from an address
        self.pointers = {name: self.new_name(f"{name}_ptr") for name in step.graph.inputs}
        self.rows = {name: self.new_name(f"{name}_row") for name in step.tokens}
        self._find_axes()

    def _find_axes(self) -> None:
        """Set `batch` to the batch axis of the states, `inner` to the reduced axis (None if there is none), `length` to
        its size (else 1), `across` to {axis: size} of the remaining axes longer than 1, and `count` to the product of
        these sizes. Raise NoKernel if states or reductions do not fit."""
        states = [self.graph.inputs[name] for name in self.step.states]
        axes, shape = self.axes.axes_of(states[0]), _find_row_shape(states[0])
        if any(self.axes.axes_of(state) != axes for state in states):
            raise NoKernel("its states differ in shape")
        sizes = {axis: n for axis, n in zip(axes, shape, strict=True) if axis not in (None, axes[0])}
        if len(sizes) != sum(n > 1 for n in shape):
            raise NoKernel("two axes of its states meet")
        reduced = {axis for node in self.graph.nodes for axis in self._reduced_axes(node)}
        if len(reduced) > 1 or not reduced <= sizes.keys():
            raise NoKernel(f"its op {self._list_reductions()} does not run over one axis of its states")
        self.batch, self.inner = axes[0], next(iter(reduced), None)
        self.length = sizes.pop(self.inner) if self.inner is not None else 1
        if self.length > MAX_ELEMENTS:
            raise NoKernel(f"its op {self._list_reductions()} has more than {MAX_ELEMENTS} terms")
        self.across = {axis: n for axis, n in sizes.items() if axis is not None}
        self.count = math.prod(sizes.values())

    def _reduced_axes(self, node: Node) -> list[Axis]:
        """Return the axes over which `node` sums or reduces; [] if it is neither a reduction nor a matrix product."""
        if node.op is not ops.matmul and node.op not in REDUCED:
            return []
        x = node.inputs[0]
        assert x is not None
        dims = [len(x.shape) - 1] if node.op is ops.matmul else sorted(find_reduced_dims(node))
        return [axis for d in dims if (axis := self.axes.axes_of(x)[d]) is not None]

    def _list_reductions(self) -> str:
        return ", ".join(dict.fromkeys(node.op.name for node in self.graph.nodes if self._reduced_axes(node)))

    def new_name(self, name: str) -> str:
        """Return a new variable name: `name`, with underscores appended until no other variable has it."""
        name = f"v_{name}" if name[0].isdigit() else name
        while keyword.iskeyword(name) or name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def write(self) -> ScanKernel:
        """Return the kernel."""
        step, stores = self.step, list[str]()
        if integers := next((v for v in self.graph.inputs.values() if not v.type.dtype.is_float), None):
            raise NoKernel(f"{integers.name} is not a floating-point tensor")
        for name in step.states:
            address, mask = self._address(self.graph.inputs[name])
            stores.append(self._store(self.pointers[name], address, self[step.new_state(name)], mask))
        results = {name: self.new_name(f"{name}_ptr") for name in step.outputs}
        for name, pointer in results.items():
            value = _undo_reshapes(self.graph.outputs[name])
            y = self[value]
            if not self.across.keys() <= {*self.axes.axes_of(value)}:
                raise NoKernel(f"its output {name} lacks an axis of its states")
            address, mask = self._address(value)
            stores.append(self._store(pointer, address, y, mask))
        parameters = ", ".join([*self.pointers.values(), *results.values(), *self.rows.values()])
        doc = f"One token: {', '.join(step.states)}, in place, and {', '.join(step.outputs)}."
        head = f"@jit\ndef {{name}}({parameters}, BLOCK: tl.constexpr, PDL: tl.constexpr):"
        docstring = f'"""{doc} Grid [blocks of {self.count} rows, batch]."""'
        barrier = "tl.debug_barrier()  # several warps may hold the same part of a state: all have read it"
        lines = [head, docstring, *self._indices(), *self.loads, *self.lines, barrier, *stores]
        most = MAX_ROWS if self.inner is None else max(1, min(MAX_REDUCED_ROWS, MAX_ELEMENTS // self.length))
        shapes = tuple(_find_row_shape(self.graph.outputs[name])[1:] for name in step.outputs)
        return ScanKernel("\n    ".join(lines), self.count, min(most, power_of_2(self.count)), shapes)

    def _indices(self) -> list[str]:
        rows, there = "tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", f"p < {self.count}"
        first = ["start_next(PDL)", "row = tl.program_id(1).to(tl.int64)"]
        if self.inner is None:
            return [*first, f"p = {rows}", f"there = {there}", "wait_for_previous(PDL)"]
        tile = f"({rows})[:, None], tl.arange(0, {power_of_2(self.length)})[None, :]"
        return [*first, f"p, n = {tile}", f"there, known = {there}, n < {self.length}", "wait_for_previous(PDL)"]

    # -- memory

    def _view(self, value: Value) -> _View | None:
        """Return `value` as a strided view of an input, through ops that only move elements; None otherwise."""
        node = value.producer
        if node is None:
            return _View(value.name, _compute_strides(_find_row_shape(value)))
        x = node.inputs[0] if node.op in MOVES else None
        view = None if x is None else self._view(x)
        if x is None or view is None:
            return None
        strides, new = view.strides, _find_row_shape(value)
        if node.op is ops.transpose:
            return _View(view.name, tuple(strides[a] for a in node.attrs["axes"]))
        if node.op is ops.expand:
            return _View(view.name, (0,) * (len(new) - len(strides)) + strides)
        if is_regrouping(node):
            return _View(view.name, _compute_strides(new)) if strides == _compute_strides(_find_row_shape(x)) else None
        varying = iter([s for s, n in zip(strides, x.shape, strict=True) if n != 1])
        return _View(view.name, tuple(0 if n == 1 else next(varying) for n in value.shape))

    def _address(self, value: Value) -> tuple[str, str]:
        """Return the source of the offsets and of the mask ("" for none) of `value`, stored as a contiguous tensor."""
        shape = _find_row_shape(value)
        address, mask = self._offset(value, _View("", _compute_strides(shape)), math.prod(shape))
        if self.across:
            return address, mask
        # Values are tiles: the address must be one.
        return f"{address} + p", f"there & {mask}" if mask else "there"

    def _offset(self, value: Value, view: _View, size: int = 0) -> tuple[str, str]:
        """Return the source of the offsets of `value` from the pointer of the input that it is a `view` of, and of its
        mask ("" for none). Batch rows are `size` elements apart; with 0, the row stride of a token, or 0 for a
        constant. Raise NoKernel if an axis of `value` is in no state."""
        across, inner = dict[Axis, int](), 0
        for axis, stride in zip(self.axes.axes_of(value), view.strides, strict=True):
            if axis in self.across:
                across[axis] = across.get(axis, 0) + stride
            elif axis is not None and axis == self.inner:
                inner += stride
            elif axis not in (None, self.batch):
                name = value.producer.op.name if value.producer is not None else value.name
                raise NoKernel(f"{name} has an axis that no state has")
        texts = [f"row * {size}"] if size else [f"row * {self.rows[view.name]}"] if view.name in self.rows else []
        texts += self._terms(across) + ["n" if inner == 1 else f"n * {inner}"] * bool(inner)
        return " + ".join(texts), " & ".join(["there"] * any(across.values()) + ["known"] * bool(inner))

    def _terms(self, strides: Mapping[Axis, int]) -> list[str]:
        """Return the terms of an offset that depend on p; axes that are contiguous in memory share one."""
        groups, below = list[tuple[int, int, int]](), self.count  # size, stride, values of p for each index
        for axis, size in self.across.items():
            below //= size
            stride = strides.get(axis, 0)
            if stride and groups and groups[-1][1:] == (stride * size, below * size):
                groups[-1] = groups[-1][0] * size, stride, below
            elif stride:
                groups.append((size, stride, below))
        return [
            "p"
            + f" // {below}" * (below > 1)
            + f" % {size}" * (size * below < self.count)
            + f" * {stride}" * (stride > 1)
            for size, stride, below in groups
        ]

    def _store(self, pointer: str, address: str, value: str, mask: str) -> str:
        masked = f", mask={mask}" if mask else ""
        return f"tl.store({pointer} + {address}, {value}.to({pointer}.dtype.element_ty){masked})"

    # -- values

    def __getitem__(self, value: Value) -> str:
        """Return the name of the variable with `value`, which is loaded or computed at the first request."""
        if value not in self.variables:
            self.variables[value] = self._load(value) or self._compute(value)
        return self.variables[value]

    def _load(self, value: Value) -> str | None:
        """Return the variable with `value` in fp32, loaded once per address; None unless a view of an input."""
        if (view := self._view(value)) is None:
            return None
        size = math.prod(_find_row_shape(self.graph.inputs[view.name])) if view.name in self.step.states else 0
        address, mask = self._offset(value, view, size)
        place = f"{self.pointers[view.name]} + {address}" if address else self.pointers[view.name]
        if place not in self.loaded:
            name = self.loaded[place] = self.new_name(view.name)
            masked = f", mask={mask}, other=0.0" if mask else ""
            self.loads.append(f"{name} = tl.load({place}{masked}).to(tl.float32)")
        return self.loaded[place]

    def _compute(self, value: Value) -> str:
        """Return the variable with `value`, after the lines that compute it. Raise NoKernel if kernels lack an op."""
        node = value.producer
        assert node is not None
        moves, operands = node.op in MOVES, [v for v in node.inputs if v is not None]
        # Checked before operands are computed, so that the reason names this op, not one that it reads.
        supported = moves or self._expression(node, [""] * len(operands)) is not None
        if not supported or is_regrouping(node) or len(node.outputs) > 1:
            raise NoKernel(f"no kernel has its op {node.op.name}")
        texts = [self[v] for v in operands]
        if moves:
            return texts[0]
        name = self.new_name(value.name)
        self.lines.append(f"{name} = {self._expression(node, texts)}")
        return name

    def _expression(self, node: Node, texts: Sequence[str]) -> str | None:
        """Return the expression of `node`, given that of each operand (`texts`); None if kernels lack its op."""
        op, a, x = node.op, node.attrs, texts[0] if texts else ""
        if op.name in TEXTS:
            return TEXTS[op.name].format(*texts)
        if op is ops.matmul:
            product = f"{x} * {texts[1]}"
            return self._reduce(ops.sum, product) if self._reduced_axes(node) else product
        if op in REDUCED:
            return self._reduce(op, x) if self._reduced_axes(node) else x
        if op is ops.affine:
            start = f"tl.zeros_like({x})" if a["by"] == 0 else x if a["by"] == 1 else f"{x} * {_format_number(a['by'])}"
            return f"{start} + {_format_number(a['plus'])}" if a["plus"] != 0 else start
        if op is ops.clip:
            text = x if a["low"] is None else f"tl.maximum({x}, {_format_number(a['low'])})"
            return text if a["high"] is None else f"tl.minimum({text}, {_format_number(a['high'])})"
        if op is ops.cast and a["to"].is_float:  # as in torch, where a step computes in f32
            return f"{x}.to(tl.float32)"
        if (name := find_kernel_activation(find_activation_name(node))) is not None:
            return f'activate({x}, "{name}")'
        return f"{x} * tl.sigmoid({x} * {_format_number(a['beta'])})" if op is ops.swish else None

    def _reduce(self, op: Op, text: str) -> str:
        filling, function = REDUCED[op]
        total = f"{function}(tl.where(known, {text}, {filling}), axis=1, keep_dims=True)"
        return f"{total} / {self.length}" if op is ops.mean else total


def _undo_reshapes(value: Value) -> Value:
    """Return the value from which reshapes that keep the batch as the first axis compute `value`."""
    node = value.producer
    while node is not None and node.op in (ops.reshape, ops.squeeze, ops.unsqueeze):
        x = node.required_operand("x")
        if x.shape[:1] != (BATCH,):
            break
        value, node = x, x.producer
    return value
