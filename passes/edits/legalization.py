"""Legalization: expand ops that a target does not accept into their bodies, until it accepts every node."""

from __future__ import annotations

from collections.abc import Callable

from weft.ir import Graph, Node, WeftError, ops
from weft.ir.op import Trait
from weft.ir.registry import Registry

from ..core.trace import Trace
from .edit import backward_slice, replace_uses

Accepts = Callable[[Node], list[str] | None]
# By target, its `Accepts` for a graph and the name of its form; targets register themselves.
ACCEPTS: Registry[Callable[[Graph, str], Accepts]] = Registry("target", "weft.backends.targets", "see `weft targets`")


def is_fused(node: Node) -> bool:
    """Return whether `node` is a fused op or a pack, which passes with on_fused = False refuse.

    A norm_linear without a norm weight and activation is not: all passes handle it.
    """
    plain = node.op is ops.norm_linear and len(node.inputs) <= 3 and node.attrs["activation"] == "identity"
    return node.op is ops.pack or (Trait.FUSED in node.op.traits and not (plain and node.attrs["kind"] != "none"))


def legalize(graph: Graph, accepts: Accepts, trace: Trace | None = None) -> None:
    """Expand nodes into their bodies, in place, until the target accepts every node; record expansions in `trace`.

    `accepts(node)` returns None for an accepted node, or a list of reasons.

    Raises:
        WeftError: if a refused op has no body (or one that contains itself), naming its origin and every reason.
    """
    for node in list(graph.nodes):
        _legalize(graph, node, accepts, trace or Trace(), ())


def _legalize(graph: Graph, node: Node, accepts: Accepts, trace: Trace, within: tuple[Node, ...]) -> None:
    refusals = accepts(node)
    if refusals is None:
        return
    name, at = node.op.name, node.output.name
    why = "; ".join(refusals) or "no lowering"
    # A node whose body contains its like would expand forever.
    if not node.op.has_body or any(n.op is node.op and n.attrs == node.attrs for n in within):
        origin = f", in the body of {' in '.join(n.op.name for n in reversed(within))}," if within else ""
        raise WeftError(f"op {name}{origin} at %{at} cannot be lowered and has no simpler form: {why}")
    with graph.inserting(before=node):
        expansion = node.op.expand(node)
    operands = {v for v in node.inputs if v is not None}
    new_nodes = backward_slice(expansion, operands)
    for old, new in zip(node.outputs, expansion, strict=True):
        replace_uses(old, new, rename=new not in operands)
    graph.erase(node)
    trace.record_rewrite(f"expand {name}", at)
    trace.note(f"expanded {name} at %{at}: {why}")
    for child in new_nodes:
        _legalize(graph, child, accepts, trace, (*within, node))
