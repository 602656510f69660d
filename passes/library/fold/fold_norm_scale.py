"""Folding the weight and bias of norms into the linears that read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Value
from weft.ir.op import Trait

from ...core.base import Pass
from ...core.trace import Trace
from ...edits.absorb import read_through, reads, scaled, unable, weights_read_with
from ...edits.edit import changed, drop_params, only_params


@dataclass(frozen=True)
class Site:
    """A norm, and the linears and experts that are all that reads what it makes."""

    norm: Node
    readers: tuple[Node, ...]

    @property
    def key(self) -> tuple[Value | None, ...]:
        """Properties that readers of a shared weight must have in common for it to stay shared."""
        return self.norm.operand("weight"), _bias(self.norm)


def _bias(norm: Node) -> Value | None:
    return norm.operand("bias") if "bias" in {o.name for o in norm.op.operands} else None


def site(norm: Node) -> Site | str:
    """The readers of `norm`, or why they cannot take its weight and bias."""
    found = reads(norm.output)
    if isinstance(found, str):
        return found
    for node, i in found:
        why = unable(node, i)
        if why is not None:
            return why
    if not only_params((norm.operand("weight"), _bias(norm))):
        return "its weight is computed"
    return Site(norm, tuple(dict.fromkeys(node for node, _ in found)))


def sites(
    graph: Graph,
    name: str,
    trace: Trace,
    find: Callable[[Node], Site | str | None],
    untie: bool,
    needed: Callable[[Site], bool] = lambda s: True,
) -> list[Site]:
    """Collect the sites that `find` returns for the norms of `graph`; its reasons are traced as refusals of pass
    `name`.

    Unless `untie`, so are those whose weights somebody else reads, if they need to change (`needed`): changing them
    would copy them. They may be shared among sites with equal norm weights, as those of shared layers are.
    """
    found: dict[Node, Site] = {}
    for norm in (n for n in graph.nodes if Trait.NORM in n.op.traits):
        one = find(norm)
        if isinstance(one, str):
            trace.refuse(name, norm.output.name, one)
        elif one is not None:
            found[norm] = one
    # To a fixpoint: refusing a site may leave another one's weight with a reader that does not change.
    while not untie:
        reading = {reader: s for s in found.values() for reader in s.readers}
        stuck = {n: why for n, s in found.items() if needed(s) and (why := _shared(s, reading)) is not None}
        if not stuck:
            break
        for norm, why in stuck.items():
            trace.refuse(name, norm.output.name, f"{why}; untie=true copies it")
            del found[norm]
    return list(found.values())


def _shared(s: Site, reading: dict[Node, Site]) -> str | None:
    for reader in s.readers:
        for weight in weights_read_with(reader):
            for other in weight.users:
                if other not in reading or reading[other].key != s.key:
                    return f"its reader's %{weight.name} is shared with {other.op.name} (%{other.output.name})"
            if weight.is_output:
                return f"its reader's %{weight.name} is an output of the graph"
    return None


def fold(s: Site) -> Site:
    """Take the weight and bias of the norm into the weights and biases of its readers, by recipe."""
    weight, bias = s.key
    if weight is None and bias is None:
        return s
    along = scaled(weight.recipe) if isinstance(weight, Param) else None
    shift = bias.recipe if isinstance(bias, Param) else None
    readers = tuple(read_through(reader, along, shift) for reader in s.readers)
    norm = changed(s.norm, {name: None for name, v in (("weight", weight), ("bias", bias)) if v is not None})
    drop_params(norm.graph, (weight, bias))
    return Site(norm, readers)


@dataclass(frozen=True)
class FoldNormScale(Pass):
    """Fold the weight g and bias β of norms into every linear that reads them.

    W (g ⊙ x̂ + β) + b = (W diag g) x̂ + (b + W β): RMSNorm and LayerNorm are then without parameters, also where they
    are fused with the residual addition. Routers and the up and gate projections of experts count as linears; slices
    and gathers of whole rows may stand between. A linear without a bias gets one where the norm has one. With `untie`,
    a weight that others read too, such as the head that is the embedding table, is copied; otherwise its norm is left
    alone.

    Condition: nothing but linears and experts reads the norm. Where its output is also the residual (post-norm), goes
    into a sum (a norm after a sublayer), into rope or attention (norms of queries and keys), or out of the graph, the
    weight has to stay; and into the linear *before* a norm it cannot go, because the norm would divide by it again.

    Source: FlashNorm (Graef 2024, 2407.09577); SliceGPT (Ashkboos 2024, 2401.15024).

    Example fold-norm-scale::

        graph example {
          input %x: f32[batch, seq, 4]
          param %norm.weight: f32[4] = normal([4], std=0.5, stream="g", mean=1.0)
          param %up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          %norm: f32[batch, seq, 4] = rms_norm(%x, %norm.weight)
          %up: f32[batch, seq, 6] = linear(%norm, %up.weight)
          output y = %up
        }
    """

    name = "fold-norm-scale"
    effect = "exact"
    purpose = "Fold into weights"
    see = ("layernorm-to-rmsnorm", "norm-across-rope")
    tradeoff = "the bias of a LayerNorm becomes biases of its readers; with untie a tied weight is stored twice"
    untie: bool = False

    def run(self, graph: Graph, trace: Trace) -> None:
        def found(norm: Node) -> Site | str | None:
            return None if norm.operand("weight") is None and _bias(norm) is None else site(norm)

        for one in sites(graph, self.name, trace, found, self.untie):
            trace.fired(self.name, one.norm.output.name)
            fold(one)
