"""Routing of tokens to experts, and the number of parameters that stay idle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.ir.ops.routing import route

from ..model.network import Network, Vertex
from .kinds import abbreviate_layers

EXAMPLES = 12  # tokens with random scores that illustrate the rule


@dataclass(frozen=True)
class RoutingRule:
    """The routing rule of a layer: the attributes of the op `route` (`k` is None if the number of experts varies),
    a sentence about the `capacity` of an expert (or ""), and whether there is also a `shared` expert."""

    experts: int
    k: int | None
    scoring: str
    renormalize: bool
    scale: float
    groups: int
    top_groups: int
    group_score: str
    capacity: str
    shared: bool


def build_panel(network: Network) -> list[dict[str, Any]] | None:
    """Return the data of every distinct routing rule of `network`; None for a network without experts."""
    rules: dict[RoutingRule, list[Vertex]] = {}
    for v in network.vertices:
        if v.weft_op.op == "moe" and v.weights:
            rules.setdefault(_read_rule(v, network), []).append(v)
    return [_to_dict(rule, vertices) for rule, vertices in rules.items()] or None


def _read_rule(v: Vertex, network: Network) -> RoutingRule:
    siblings = [u for u in network.vertices if u.scope == v.scope and u is not v]
    inside = any(u.scope.startswith(f"{v.scope}.") and u.weights for u in network.vertices)
    router = next((u.weft_op for u in siblings if u.weft_op.op == "route"), None)
    limit = next((u.weft_op for u in siblings if u.weft_op.op in ("limit_capacity", "expert_choice")), None)
    text, active = (router or replace(v, attrs={})).text, v.weft_op.attrs.get("active")
    return RoutingRule(
        int(v.weights[0].dims[0]),
        None if active is None else int(str(active)),
        text("scoring", "softmax"),
        text("renormalize", "true") == "true",
        float(text("scale", "1")),
        int(text("groups", "1")),
        int(text("top_groups", "1")),
        text("group_score", "top2"),
        _describe_capacity(limit),
        inside,
    )


def _describe_capacity(limit: Vertex | None) -> str:
    if limit is None:
        return ""
    tokens = limit.attrs.get("capacity")
    most = f"{tokens} tokens" if tokens is not None else f"{limit.attrs.get('factor', 1)} times its share of tokens"
    if limit.op == "expert_choice":
        return f"Every expert takes the {most} that score highest (Zhou 2022)."
    return f"An expert takes at most {most}; further tokens skip it (residual only)."


def _to_dict(rule: RoutingRule, vertices: list[Vertex]) -> dict[str, Any]:
    expert_sizes = [sum(w.learned for w in v.weights) // rule.experts for v in vertices]
    return {
        "where": abbreviate_layers(v.scope or v.name for v in vertices),
        "at": vertices[0].name,
        "layers": len(vertices),
        "experts": rule.experts,
        "k": rule.k,
        "groups": rule.groups,
        "shared": rule.shared,
        "sentences": list(_describe_rule(rule)),
        "parameters": sum(expert_sizes) * rule.experts,
        "idle": sum(expert_sizes) * (rule.experts - (rule.k or rule.experts)),
        "examples": route_examples(rule),
    }


def _describe_rule(rule: RoutingRule) -> Iterator[str]:
    if rule.k is not None:
        shared = " and to a shared one" if rule.shared else ""
        yield f"Each token is routed to {rule.k} of {rule.experts} experts{shared}."
    scores = "The sigmoid" if rule.scoring == "sigmoid" else "The softmax"
    weight = " divided by their sum" if rule.renormalize and rule.k != 1 else ""
    times = f", times {rule.scale:g}" if rule.scale != 1 else ""
    yield f"{scores} of the router's scores{weight}{times} is the weight of an expert's result."
    if rule.groups > 1:
        best = "best expert scores" if rule.group_score == "max" else "two best experts score"
        yield (
            f"The experts form {rule.groups} groups of {rule.experts // rule.groups}; only the "
            f"{rule.top_groups} groups whose {best} highest are chosen from."
        )
    if rule.capacity:
        yield rule.capacity


def route_examples(rule: RoutingRule) -> list[list[list[float]]]:
    """Return the [expert, weight] pairs of each of EXAMPLES tokens with random scores; empty if `rule.k` is None."""
    if rule.k is None:
        return []
    logits = np.random.default_rng(0).standard_normal((EXAMPLES, rule.experts))
    combine = route.reference(logits, **{name: getattr(rule, name) for name in route.attrs})
    return [[[int(e), float(f"{row[e]:.4g}")] for e in np.flatnonzero(row)] for row in combine]
