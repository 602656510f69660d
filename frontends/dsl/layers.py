"""Layers with parameters: linear maps, embeddings, normalizations, positions that are added."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.recipes.frequencies import Sinusoid
from weft.ir.types import TensorType, dtypes, sizes

from .build import Init, computed, current, fill, module, own_name, param, provided
from .checks import need_positive, need_whole


def linear(x: Value, out: int | Value, name: str = "linear", bias: bool = False, init: Init | None = None) -> Value:
    """x Wᵀ (+ b): x [..., in] → [..., out], with parameters ``name.weight`` [out, in] and ``name.bias`` [out].

    `out` may be a weight value instead of a width (tied weights).
    """
    weight = out if isinstance(out, Value) else param(f"{name}.weight", (out, x.width), init)
    return ops.linear(x, weight, param(f"{name}.bias", weight.shape[:1], fill(0.0)) if bias else None, name=name)


def embedding(ids: Value, rows: int | Value, dim: int = 0, name: str = "embed", init: Init | None = None) -> Value:
    """Rows of the table ``name.weight`` [rows, dim] picked by `ids` [...] → [..., dim].

    ``embedding(ids, table)`` with a value for a table makes no parameter.
    """
    if not isinstance(rows, Value):
        if not isinstance(dim, int) or dim < 1:
            raise WeftError(f"embedding {name}: dim={dim!r} must be a positive width")
        rows = param(f"{name}.weight", (rows, dim), init)
    return ops.embedding(ids, rows, name=name)


def positions(x: Value) -> Value:
    """The positions [batch, seq] of the rows of x [batch, seq, ...]: those provided, else the input position_ids."""
    positions = provided("positions")
    if positions is not None:
        return positions
    graph = current().graph
    known = graph.inputs.get("position_ids")
    return graph.add_input("position_ids", TensorType(dtypes.i64, x.shape[:2])) if known is None else known


def is_causal(causal: bool | None = None) -> bool:
    """`causal` where a module says it; None means what the model is (a decoder is causal, an encoder is not)."""
    return provided("bidirectional") is None if causal is None else causal


@module(leaf=True)
class RMSNorm:
    """x / √(mean(x²) + eps) ⊙ weight (Zhang & Sennrich 2019); `weight` False leaves the weight out."""

    eps: float = 1e-6
    weight: bool = True

    def __post_init__(self) -> None:
        need_positive(self, "eps")

    def __call__(self, x: Value) -> Value:
        name = own_name()
        weight = param(f"{name}.weight", (x.width,), fill(1.0)) if self.weight else None
        return ops.rms_norm(x, weight, eps=self.eps, name=name)

    def plain(self) -> RMSNorm:
        """The same without parameters."""
        return RMSNorm(self.eps, weight=False)


@module(leaf=True)
class LayerNorm:
    """(x − μ)/√(σ² + eps) ⊙ weight + bias (Ba 2016); `weight` or `bias` False leaves that parameter out."""

    eps: float = 1e-5
    weight: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        need_positive(self, "eps")

    def __call__(self, x: Value) -> Value:
        name = own_name()
        weight = param(f"{name}.weight", (x.width,), fill(1.0)) if self.weight else None
        bias = param(f"{name}.bias", (x.width,), fill(0.0)) if self.bias else None
        return ops.layer_norm(x, weight, bias, eps=self.eps, name=name)

    def plain(self) -> LayerNorm:
        """The same without parameters."""
        return LayerNorm(self.eps, weight=False, bias=False)


Norm = RMSNorm | LayerNorm


@module(leaf=True)
class LearnedPositions:
    """x + Embedding(position + offset): a table [length + offset, dim] of learned absolute positions (GPT, BERT; BART
    and RoBERTa have an offset of 2)."""

    length: int
    offset: int = 0

    def __post_init__(self) -> None:
        need_whole(self, "length")
        need_whole(self, "offset", least=0)

    def __call__(self, x: Value) -> Value:
        name = own_name()
        return _added(x, param(f"{name}.weight", (self.length + self.offset, x.width)), self.offset, name)


def _added(x: Value, table: Value, offset: int, name: str) -> Value:
    """x plus the rows of `table` at its positions, the first of which is at `offset`."""
    at = positions(x)
    at = ops.affine(at, plus=offset, name=f"{name}_rows") if offset else at
    return ops.add(x, ops.embedding(at, table, name=name), name=f"{name}_added")


@module(leaf=True)
class Sinusoidal:
    """x + p, p[pos, 2i] = sin(pos/10000^(2i/d)), p[pos, 2i+1] the cosine (Vaswani 2017), for `length` positions.

    All sines come before all cosines if not `interleaved`. The first position is `offset` (2 in M2M-100 and XGLM).
    `inclusive` divides 2i by d − 2, so that the last frequency is 1/10000 (tensor2tensor, fairseq).
    """

    length: int
    interleaved: bool = True
    offset: int = 0
    inclusive: bool = False

    def __post_init__(self) -> None:
        need_whole(self, "length")
        need_whole(self, "offset", least=0)

    def __call__(self, x: Value) -> Value:
        if x.width % 2:
            raise WeftError(f"sine and cosine are pairs: the width {x.width} must be even")
        if self.inclusive and x.width < 4:
            raise WeftError(f"inclusive frequencies need a width of at least 4, not {x.width}")
        name, shape = own_name(), (self.length + self.offset, x.width)
        kind = {"interleaved": self.interleaved, "inclusive": self.inclusive}
        table = computed(f"{name}.table", shape, Sinusoid(*shape, **kind))
        return _added(x, table, self.offset, name)


def last_axis(x: Value, pieces: int, what: str) -> int:
    """The width of x divided by `pieces`.

    Raises:
        WeftError: if it does not divide.
    """
    if x.width % pieces:
        raise WeftError(f"{what}={pieces} does not divide the width {x.width}")
    return sizes.evaluate(x.width, {}) // pieces
