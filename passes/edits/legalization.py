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
    """Return whether passes with on_fused = False refuse `node`: it is a pack or a fused op.

    A norm_linear with a norm, but without norm weight, norm bias and activation, does not count: all passes support it.
    """
    plain = node.op is ops.norm_linear and len(node.inputs) <= 3 and node.attrs["activation"] == "identity"
    return node.op is ops.pack or (Trait.FUSED in node.op.traits and not (plain and node.attrs["kind"] != "none"))


def legalize(graph: Graph, accepts: Accepts, trace: Trace | None = None) -> None:
    """Expand nodes of `graph` into the bodies of their ops, until `accepts` accepts every node; record this in `trace`.

    `accepts(node)` returns None if the target accepts the node, else a list of reasons.

    Raises:
        WeftError: if a node that is not accepted has no body, or its body has the same op with the same attributes.
    """
    for node in list(graph.nodes):
        _legalize(graph, node, accepts, trace or Trace(), ())


def _legalize(graph: Graph, node: Node, accepts: Accepts, trace: Trace, within: tuple[Node, ...]) -> None:
    refusals = accepts(node)
    if refusals is None:
        return
    name, at = node.op.name, node.output.name
    why = "; ".join(refusals) or "no lowering"
    # A body that contains the same op with the same attributes would expand forever.
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
