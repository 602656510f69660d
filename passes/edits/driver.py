"""The rewrite driver: apply rules until none matches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from weft.ir import Graph, Node, Value

from ..core.trace import Miss, Trace
from .edit import backward_slice, erase_unused, replace_uses
from .pattern import Match, Pattern


@dataclass(frozen=True)
class Refusal:
    """The result of a rule that rejects a match, for a `reason` that a pattern cannot express."""

    reason: str


@dataclass(frozen=True)
class Rule:
    """A `pattern` and the function `rewrite` that replaces its matches.

    `rewrite` takes the variables and captured attributes of the pattern as keyword arguments. It emits nodes and
    returns one value per result of the pattern, or it returns a `Refusal` without emitting nodes. Each parameter of the
    pattern's function is passed, as None if it was not bound; other names are passed only if they were bound.
    """

    name: str
    pattern: Pattern
    rewrite: Callable[..., Value | Sequence[Value] | Refusal]


def apply_rules(graph: Graph, rules: Sequence[Rule], trace: Trace) -> int:
    """Apply `rules`, earlier ones first at each node, until none matches; return the number of rewrites.

    New nodes are inserted before the root of the match, or before the first reader outside the match if that is
    earlier. They get the scope of the root and the names of the values that they replace. `trace` counts rewrites and
    records the nearest miss of every rule that never fires.
    """
    fired = {rule.name: 0 for rule in rules}
    nearest: dict[str, Miss | None] = {rule.name: None for rule in rules}
    # A bound on rewrites: rules that rebuild each other's patterns would never reach a fixpoint.
    bound, total, changed = 100 * (len(graph) + 10), 0, True
    while changed:
        changed = False
        for node in graph.nodes:
            for rule in rules:
                # `nodes` may be edited while it is walked: an earlier rule may have erased this node.
                if node.erased or rule.pattern.root.op is not node.op:
                    continue
                # Read the name first: the rewrite gives it to the replacement.
                match, name = rule.pattern.match(node), node.output.name
                miss = _rewrite_match(graph, rule, match, node) if isinstance(match, Match) else match
                if miss is not None:
                    # Of equally deep misses, `max` returns the first.
                    nearest[rule.name] = max(nearest[rule.name] or miss, miss, key=attrgetter("depth"))
                    trace.near[name] = max(trace.near.get(name, miss), miss, key=attrgetter("depth"))
                    continue
                trace.record_rewrite(rule.name, name)
                fired[rule.name] += 1
                total, changed = total + 1, True
                if total > bound:
                    raise RuntimeError(f"rule {rule.name} keeps firing on its own results")
    for name, count in fired.items():
        if not count:
            trace.record_miss(name, nearest[name])
    return total


def _rewrite_match(graph: Graph, rule: Rule, match: Match, root: Node) -> Miss | None:
    """Replace `match` by the result of `rule` and return None; return a Miss if the rule refuses, or if no position is
    after all operands and before all readers of the new nodes."""
    at = f"{root.op.name} (%{root.output.name})"
    # A full match is nearer than any miss inside the pattern, whose bonus is at most 0.5.
    depth = len(match.nodes) + 0.75
    anchor = _find_anchor(graph, match, root)
    if isinstance(anchor, str):
        return Miss(depth, at, anchor)
    size, scope = len(graph), root.scope
    with graph.inserting(before=anchor):
        absent = {v.name: None for v in rule.pattern.variables}
        replacement = rule.rewrite(**absent | match.bindings)
    if isinstance(replacement, Refusal):
        if len(graph) != size:
            raise RuntimeError(f"rule {rule.name} emitted nodes before it refused")
        return Miss(depth, at, replacement.reason)
    new = [replacement] if isinstance(replacement, Value) else list(replacement)
    bound = {v for v in match.bindings.values() if isinstance(v, Value)}
    bound.update(v for node in match.nodes.values() for v in node.outputs)
    for node in backward_slice(new, bound):
        node.scope = scope
    for old, value in zip(match.exposed, new, strict=True):
        if old.type != value.type:
            raise RuntimeError(f"rule {rule.name} replaces {old!r} by {value!r}")
        # A value that existed before keeps its own name.
        replace_uses(old, value, rename=value not in bound)
    erase_unused(graph, match.nodes.values())
    return None


def _find_anchor(graph: Graph, match: Match, root: Node) -> Node | str:
    """Return the node before which the replacement is inserted; a reason (str) if an operand is computed too late."""
    inside = set(match.nodes.values())
    readers = {n for v in match.exposed for n in v.users if n not in inside}
    # If only results of the root are read outside, its place is right: after all operands, before all readers.
    if not any(v.producer is not root and any(n not in inside for n in v.users) for v in match.exposed):
        return root
    # An inner result may have a reader before the root; the replacement must come before that reader.
    anchor = graph.nodes.find_first((root, *readers))
    if anchor is root:
        return root
    # Only nodes from the anchor to the root can define an operand too late.
    later = set(itertools.takewhile(lambda node: node is not anchor, graph.nodes.items_before(root))) | {anchor}
    for value in match.bindings.values():
        if isinstance(value, Value) and value.producer in later:
            return f"%{value.name} is computed after %{anchor.output.name} reads the result"
    return anchor
