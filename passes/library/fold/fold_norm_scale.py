"""Fold the weight and bias of norms into the linears that read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Value
from weft.ir.op import Trait

from ... import Pass, Trace
from ...edits.absorb import absorb_input_map, explain_refusal, find_input_weights, find_readers, make_scale_map
from ...edits.edit import are_params, erase_unused_params, rebuild_node


@dataclass(frozen=True)
class Site:
    """A norm and its `readers`, the linears and experts that read it directly or after slices and gathers of rows."""

    norm: Node
    readers: tuple[Node, ...]

    @property
    def key(self) -> tuple[Value | None, ...]:
        """Return (weight, bias) of the norm. Sites whose readers share a weight must have equal keys to be folded."""
        return self.norm.operand("weight"), _find_bias(self.norm)


def _find_bias(norm: Node) -> Value | None:
    return norm.operand("bias") if "bias" in {o.name for o in norm.op.operands} else None


def find_site(norm: Node) -> Site | str:
    """Return `norm` with its readers; a reason (str) if one of them cannot absorb the norm's weight and bias."""
    readers = find_readers(norm.output)
    if isinstance(readers, str):
        return readers
    for node, i in readers:
        why = explain_refusal(node, i)
        if why is not None:
            return why
    if not are_params((norm.operand("weight"), _find_bias(norm))):
        return "its weight is computed"
    return Site(norm, tuple(dict.fromkeys(node for node, _ in readers)))


def find_sites(
    graph: Graph,
    name: str,
    trace: Trace,
    find: Callable[[Node], Site | str | None],
    untie: bool,
    changes: Callable[[Site], bool] = lambda s: True,
) -> list[Site]:
    """Return the sites that `find` returns for the norms of `graph`; reasons (str) become refusals of pass `name`.
    Unless `untie`, also refuse a site with changes(site) if a weight of its readers is a graph output or is read
    outside of the sites with the same key: that reader would need a copy of the old weight."""
    sites: dict[Node, Site] = {}
    for norm in (n for n in graph.nodes if Trait.NORM in n.op.traits):
        result = find(norm)
        if isinstance(result, str):
            trace.refuse(name, norm.output.name, result)
        elif result is not None:
            sites[norm] = result
    # To a fixpoint: after a refusal, another site's weight may have a reader that does not change.
    while not untie:
        reading = {reader: s for s in sites.values() for reader in s.readers}
        refused = {n: why for n, s in sites.items() if changes(s) and (why := _explain_sharing(s, reading)) is not None}
        if not refused:
            break
        for norm, why in refused.items():
            trace.refuse(name, norm.output.name, f"{why}; untie=true copies it")
            del sites[norm]
    return list(sites.values())


def _explain_sharing(s: Site, reading: dict[Node, Site]) -> str | None:
    for reader in s.readers:
        for weight in find_input_weights(reader):
            for user in weight.users:
                if user not in reading or reading[user].key != s.key:
                    return f"its reader's %{weight.name} is shared with {user.op.name} (%{user.output.name})"
            if weight.is_output:
                return f"its reader's %{weight.name} is an output of the graph"
    return None


def fold_norm(s: Site) -> Site:
    """Fold the weight and bias of the norm of `s` into its readers, by recipe; return the site of the new nodes."""
    weight, bias = s.key
    if weight is None and bias is None:
        return s
    along = make_scale_map(weight.recipe) if isinstance(weight, Param) else None
    shift = bias.recipe if isinstance(bias, Param) else None
    readers = tuple(absorb_input_map(reader, along, shift) for reader in s.readers)
    norm = rebuild_node(s.norm, {name: None for name, v in (("weight", weight), ("bias", bias)) if v is not None})
    erase_unused_params(norm.graph, (weight, bias))
    return Site(norm, readers)


class FoldNormScale(Pass):
    """Fold the weight g and bias β of norms into every linear that reads their results.

    W (g ⊙ x̂ + β) + b = (W diag g) x̂ + (b + W β): RMSNorm, LayerNorm and add_norm then have no parameters. Routers and
    the up and gate projections of experts count as linears. Slices and gathers of rows may be between norm and linear.
    A linear without a bias gets one if the norm has one. With `untie`, a weight with other readers (such as a head tied
    to the embedding table) is copied; without it, the norm before such a weight is unchanged.

    Condition: only linears and experts read the norm. The norm is unchanged if its output is also the residual
    (post-norm) or an output of the graph, or is read by a sum (a norm after a sublayer), rope or attention (norms of
    queries and keys). Its weight cannot go into the linear *before* the norm, which would divide by it again.

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
        def find_parameterized(norm: Node) -> Site | str | None:
            return None if norm.operand("weight") is None and _find_bias(norm) is None else find_site(norm)

        for norm_site in find_sites(graph, self.name, trace, find_parameterized, self.untie):
            trace.record_rewrite(self.name, norm_site.norm.output.name)
            fold_norm(norm_site)
