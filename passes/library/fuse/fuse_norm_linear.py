"""Fusing a norm with the linears that read it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Value, ops

from ...core.base import Pass
from ...core.trace import Trace
from ...edits.absorb import centred, is_layer, read_through
from ...edits.edit import drop, replace_uses
from ..fold.fold_norm_scale import Site, fold, site, sites


def _fusible(norm: Node) -> Site | str | None:
    """The linears that alone read `norm`, directly, or what else does; None if nobody does."""
    found = site(norm)
    if isinstance(found, str):
        return found
    if isinstance(norm.inputs[0], Param):
        return "it normalizes a parameter"
    for reader in (*norm.output.users, *found.readers):
        if reader.op is not ops.linear:
            return f"it is read by {reader.op.name} (%{reader.output.name})"
    return found if found.readers else None


def _changes_weights(s: Site) -> bool:
    return any(v is not None for v in s.key) or is_layer(s.norm)


def _fuse(norm: Node, linear: Node, x: Value) -> Value:
    """One norm_linear for `norm` of `x` and the `linear` that reads it; the rows of its weight are centred already."""
    kind = "layer" if is_layer(norm) else "rms"
    with norm.graph.inserting(before=linear):
        y = ops.norm_linear(x, *linear.inputs[1:], kind=kind, eps=norm.attrs["eps"])
    norm.graph.replace(linear, y)
    return y


@dataclass(frozen=True)
class FuseNormLinear(Pass):
    """Fuse a norm with every linear that reads it: linear(norm(x), W, b) → norm_linear(x, W′, b′).

    RMSNorm divides a row by one number, which commutes with the product: ((x/r) ⊙ g) Wᵀ + b = (x W′ᵀ)/r + b with
    W′ = W diag(g), so that the product need not wait for the sum of squares. LayerNorm subtracts the mean besides,
    which is taken out of the weight: W′ is W diag(g) with every row centred, and b′ = b + W β. A norm fused with the
    residual addition (add_norm) leaves the addition. Packed linears are fused as one.

    Condition: linears alone read the norm; experts, slices or sums that do need it in its own right. Where others read
    the weights too, the norm stays as it is, unless `untie` copies them or nothing in them has to change (RMSNorm
    without a weight).

    Source: FlashNorm (Graef 2024, 2407.09577).

    Example fuse-norm-linear::

        graph example {
          input %x: f32[batch, seq, 4]
          param %norm.weight: f32[4] = normal([4], std=0.5, stream="g", mean=1.0)
          param %norm.bias: f32[4] = normal([4], std=0.5, stream="beta")
          param %up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          %norm: f32[batch, seq, 4] = layer_norm(%x, %norm.weight, %norm.bias)
          %up: f32[batch, seq, 6] = linear(%norm, %up.weight)
          output y = %up
        }
    """

    name = "fuse-norm-linear"
    effect = "exact"
    purpose = "Fuse and take apart"
    tradeoff = "results are divided instead of x, by every linear of a norm: a few FLOPs more for a trip to memory less"
    untie: bool = False

    def run(self, graph: Graph, trace: Trace) -> None:
        for one in sites(graph, self.name, trace, _fusible, self.untie, _changes_weights):
            found = fold(one)
            norm, linears = found.norm, found.readers
            if is_layer(norm):
                linears = tuple(read_through(reader, centred) for reader in linears)
            x = norm.inputs[0]
            if norm.op is ops.add_norm:
                with graph.inserting(before=norm):
                    x = ops.add(x, norm.inputs[1])
                replace_uses(norm.outputs[1], x)
            assert x is not None
            for linear in linears:
                trace.fired(self.name, _fuse(norm, linear, x).name)
            drop(graph, [norm])
