"""Layers with parameters: linear maps, embeddings, normalizations, absolute positions."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.recipes.frequencies import Sinusoid
from weft.ir.types import TensorType, dtypes, sizes

from .build import Init, constant_param, fill, get_builder, get_leaf_name, module, param, provided


def linear(x: Value, out: int | Value, name: str = "linear", bias: bool = False, init: Init | None = None) -> Value:
    """Map x [..., in] to x Wᵀ + b [..., out]. Parameters: ``name.weight`` [out, in] and, with `bias`, ``name.bias``
    [out]. `out` may also be a weight value [out, in], for tied weights; then no weight parameter is created."""
    weight = out if isinstance(out, Value) else param(f"{name}.weight", (out, x.width), init)
    return ops.linear(x, weight, param(f"{name}.bias", weight.shape[:1], fill(0.0)) if bias else None, name=name)


def embedding(ids: Value, rows: int | Value, dim: int = 0, name: str = "embed", init: Init | None = None) -> Value:
    """Return the rows of the parameter ``name.weight`` [rows, dim] at `ids` [...], as [..., dim].
    ``embedding(ids, table)`` with a value [rows, dim] as `rows` reads that table and creates no parameter."""
    if not isinstance(rows, Value):
        if not isinstance(dim, int) or dim < 1:
            raise WeftError(f"embedding {name}: dim={dim!r} must be a positive width")
        rows = param(f"{name}.weight", (rows, dim), init)
    return ops.embedding(ids, rows, name=name)


def positions(x: Value) -> Value:
    """Return the positions [batch, seq] of the tokens of x [batch, seq, ...].
    They are the value provided as ``positions``, else the graph input position_ids, which is added if missing."""
    positions = provided("positions")
    if positions is not None:
        return positions
    graph = get_builder().graph
    ids = graph.inputs.get("position_ids")
    return graph.add_input("position_ids", TensorType(dtypes.i64, x.shape[:2])) if ids is None else ids


def is_causal(causal: bool | None = None) -> bool:
    """Return `causal`; None means that of the model: True in a decoder, by default False in an encoder."""
    return provided("bidirectional") is None if causal is None else causal


@module(leaf=True)
class RMSNorm:
    """The norm x / √(mean(x²) + eps) ⊙ weight over the last axis (Zhang & Sennrich 2019); `weight` False omits it."""

    eps: float = 1e-6
    weight: bool = True

    def __call__(self, x: Value) -> Value:
        name = get_leaf_name()
        weight = param(f"{name}.weight", (x.width,), fill(1.0)) if self.weight else None
        return ops.rms_norm(x, weight, eps=self.eps, name=name)

    def plain(self) -> RMSNorm:
        """Return the same norm without parameters."""
        return RMSNorm(self.eps, weight=False)


@module(leaf=True)
class LayerNorm:
    """The norm (x − μ)/√(σ² + eps) ⊙ weight + bias over the last axis (Ba 2016); weight or bias False omits it."""

    eps: float = 1e-5
    weight: bool = True
    bias: bool = True

    def __call__(self, x: Value) -> Value:
        name = get_leaf_name()
        weight = param(f"{name}.weight", (x.width,), fill(1.0)) if self.weight else None
        bias = param(f"{name}.bias", (x.width,), fill(0.0)) if self.bias else None
        return ops.layer_norm(x, weight, bias, eps=self.eps, name=name)

    def plain(self) -> LayerNorm:
        """Return the same norm without parameters."""
        return LayerNorm(self.eps, weight=False, bias=False)


Norm = RMSNorm | LayerNorm


@module(leaf=True)
class LearnedPositions:
    """Learned absolute positions: x + table[position + offset], for positions below `length` (GPT, BERT).

    The table is the parameter ``weight`` [length + offset, dim]. BART and RoBERTa have an offset of 2.
    """

    length: int
    offset: int = 0

    def __call__(self, x: Value) -> Value:
        name = get_leaf_name()
        return _add_positions(x, param(f"{name}.weight", (self.length + self.offset, x.width)), self.offset, name)


def _add_positions(x: Value, table: Value, offset: int, name: str) -> Value:
    """Return x [batch, seq, dim] plus row position + `offset` of `table` [rows, dim] for each of its tokens."""
    rows = positions(x)
    rows = ops.affine(rows, plus=offset, name=f"{name}_rows") if offset else rows
    return ops.add(x, ops.embedding(rows, table, name=name), name=f"{name}_added")


@module(leaf=True)
class Sinusoidal:
    """Sinusoidal positions: x + p, with p[pos, 2i] = sin(pos/10000^(2i/d)) and p[pos, 2i+1] the cosine (Vaswani 2017).

    A constant table covers `length` positions. If not `interleaved`, all sines come before all cosines. The first token
    has position `offset` (2 in M2M-100 and XGLM). `inclusive` divides 2i by d − 2 instead of d, so that the last
    frequency is 1/10000 (tensor2tensor, fairseq).
    """

    length: int
    interleaved: bool = True
    offset: int = 0
    inclusive: bool = False

    def __call__(self, x: Value) -> Value:
        if x.width % 2:
            raise WeftError(f"sinusoidal positions need an even width, not {x.width}")
        if self.inclusive and x.width < 4:
            raise WeftError(f"inclusive=True needs a width of at least 4, not {x.width}")
        name, shape = get_leaf_name(), (self.length + self.offset, x.width)
        kind = {"interleaved": self.interleaved, "inclusive": self.inclusive}
        table = constant_param(f"{name}.table", shape, Sinusoid(*shape, **kind))
        return _add_positions(x, table, self.offset, name)


def divide_width(x: Value, pieces: int, setting: str) -> int:
    """Return the width of x divided by `pieces`; if there is a remainder, raise WeftError with the name `setting`."""
    if x.width % pieces:
        raise WeftError(f"{setting}={pieces} does not divide the width {x.width}")
    return sizes.evaluate(x.width, {}) // pieces
