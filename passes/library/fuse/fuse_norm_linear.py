"""Fuse a norm with the linears that read it."""

from __future__ import annotations

from typing import Any

from weft.ir import Graph, Node, Param, Value, ops

from ... import Pass, Trace
from ...edits.absorb import is_layer_norm
from ...edits.edit import are_params, erase_unused, rebuild_node, replace_uses
from ..fold.fold_norm_scale import Site, find_site, find_sites, fold_norm


def _find_fusible(norm: Node) -> Site | str | None:
    """Return `norm` with its readers if all are linears; a reason (str) if one is not; None if there are none."""
    fusible = find_site(norm)
    if isinstance(fusible, str):
        return fusible
    if isinstance(norm.inputs[0], Param):
        return "it normalizes a parameter"
    for reader in (*norm.output.users, *fusible.readers):
        if reader.op is not ops.linear:
            return f"it is read by {reader.op.name} (%{reader.output.name})"
    return fusible if fusible.readers else None


def _find_unfolded(norm: Node) -> Site | str | None:
    """Return `norm` with its readers if all are projections, or mixtures that do not normalize; else a reason (str).
    Return None for an add_norm, an output that is not [batch, seq, width], a computed weight, or no readers."""
    readers = norm.output.users
    if norm.op is ops.add_norm or len(norm.output.shape) != 3 or not are_params(norm.inputs[1:]):
        return None
    for reader in readers:
        if not is_projection(reader) and not (reader.op is ops.mixture and reader.attrs["kind"] == "none"):
            return f"it is read by {reader.op.name} (%{reader.output.name})"
    return "it is an output" if norm.output.is_output else Site(norm, readers) if readers else None


def is_projection(node: Node) -> bool:
    """Return whether `node` is a linear map of tokens [batch, seq, width] whose weights are parameters."""
    return node.op is ops.linear and len(node.output.shape) == 3 and are_params(node.inputs[1:])


def _fuse_reader(norm: Node, linear: Node, x: Value) -> Value:
    """Replace `linear` (or mixture), a reader of `norm`, by one that normalizes x itself; return its output."""
    kind = "layer" if is_layer_norm(norm) else "rms"
    norm_operands: dict[str, Any] = {"norm_weight": norm.operand("weight")}
    norm_operands |= {"norm_bias": norm.operand("bias")} if kind == "layer" else {}
    if linear.op is ops.mixture:
        return rebuild_node(linear, {"x": x, **norm_operands}, kind=kind, eps=norm.attrs["eps"]).output
    with norm.graph.inserting(before=linear):
        y = ops.norm_linear(x, *linear.inputs[1:], **norm_operands, kind=kind, eps=norm.attrs["eps"])
    norm.graph.replace(linear, y)
    return y


class FuseNormLinear(Pass):
    """Fuse a norm with every linear that reads it: linear(norm(x), W, b) → norm_linear(x, W′, b′).

    RMSNorm divides a row by a scalar, which commutes with the product: ((x/r) ⊙ g) Wᵀ + b = (x W′ᵀ)/r + b with
    W′ = W diag(g), so that the product need not wait for the sum of squares; b′ = b + W β if the norm has a bias β.
    An add_norm is split into an addition and a norm, which is fused (not with fold=false). Packed linears are fused as
    one.

    With fold=false weights are unchanged, and g and β become operands of norm_linear: the kernels of a decode step need
    this form, because they share the weights of the module. Then mixtures may also read the norm, and linears that read
    no norm become norm_linear{kind=none}, which the same kernels compute.

    Condition: only linears read the norm, not experts, slices or sums. If a weight that would change has other readers,
    the norm is unchanged, or the weight is copied with `untie`.

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
    on_fused = True
    tradeoff = "every linear of a norm divides its result instead of x: a few more FLOPs for one memory round trip less"
    untie: bool = False
    fold: bool = True

    def run(self, graph: Graph, trace: Trace) -> None:
        find, untie = (_find_fusible, self.untie) if self.fold else (_find_unfolded, True)
        for matched in find_sites(graph, self.name, trace, find, untie, lambda s: any(v is not None for v in s.key)):
            folded = fold_norm(matched) if self.fold else matched
            norm, linears = folded.norm, folded.readers
            x = norm.required_operand("x")
            if norm.op is ops.add_norm:
                with graph.inserting(before=norm):
                    x = ops.add(x, norm.inputs[1])
                replace_uses(norm.outputs[1], x)
            for linear in linears:
                trace.record_rewrite(self.name, _fuse_reader(norm, linear, x).name)
            erase_unused(graph, [norm])
        for linear in () if self.fold else [node for node in graph.nodes if is_projection(node)]:
            trace.record_rewrite(self.name, linear.output.name)
            with graph.inserting(before=linear):
                graph.replace(linear, ops.norm_linear(*linear.inputs, kind="none"))
