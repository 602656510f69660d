"""Recurrences of a decode step with what stands around them: step sizes, norms, decays, gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from weft.ir import Graph, Value, ops
from weft.ir.op import Op

from ...core.base import Pass
from ...core.trace import Trace
from ...edits.driver import Refusal, Rule, apply_rules
from ...edits.pattern import ANY, Pattern, captured, either, maybe, param, value
from .products import given


def _flat(y: Value) -> Value:
    """`y`, or `y` in another shape."""
    return either(ops.reshape(y, shape=ANY()), y)


def _scaled(y: Value, name: str) -> Value:
    return either(ops.affine(y, by=ANY(f"{name}_scale")), y)


def _rate() -> Value:
    return ops.neg(ops.exp(param("a_log")))


def _softened(*inner: Value) -> Value:
    """A pattern: the softplus of what is `inner`, of a step size with a bias, or of a step size."""
    return ops.softplus(either(*inner, ops.add(value("delta"), param("bias")), value("delta")))


def _gated(y: Value) -> Value:
    return ops.mul(y, ops.swish(value("gate")))


def _normed(y: Value) -> Value:
    return ops.rms_norm(y, maybe("norm_weight"), eps=ANY("eps"))


def _normed_by_parts(y: Value) -> Value:
    parts = ops.rms_norm(ops.reshape(y, shape=ANY("parts")), None, eps=ANY("eps"))
    return ops.mul(ops.reshape(parts, shape=ANY()), param("norm_weight"))


def _selective() -> Value:
    rank = either(ops.rms_norm(value("delta"), maybe("norm_weight"), eps=ANY("eps")), value("delta"))
    delta = either(_softened(ops.linear(rank, param("weight"), maybe("bias"))), value("step"))
    normed = ((value(n), ops.rms_norm(value(n), maybe(f"{n}_weight"), eps=ANY(f"{n}_eps"))) for n in "bc")
    b, c = (either(norm, plain) for plain, norm in normed)
    return ops.selective_scan(value("x"), delta, either(_rate(), value("a")), b, c, maybe("d"))


def _ssd() -> Value:
    delta, a = either(_softened(), value("step")), either(_rate(), value("a"))
    operands = value("x"), delta, a, value("b"), value("c"), maybe("d")
    return ops.ssd(*operands, **captured(*ops.ssd.attrs))


def _matrix(op: Op, units: bool) -> Value:
    q, k = (_unit(name) if units else _scaled(value(name), name) for name in "qk")
    rate = either(ops.unsqueeze(_rate(), axes=ANY()), _rate())
    decay = either(_flat(ops.mul(_flat(_softened()), rate)), maybe("decay"))
    beta = [_scaled(value("beta"), "beta")] if op is ops.gated_delta_rule else []
    return op(q, k, value("v"), *beta, decay, **captured(*op.attrs))


def _unit(name: str) -> Value:
    normed = ops.rms_norm(ops.reshape(value(name), shape=ANY(f"{name}_parts")), None, eps=ANY("unit_eps"))
    return ops.reshape(_scaled(normed, name), shape=ANY())


def _ended(op: Op, units: bool) -> Value:
    y = _matrix(op, units)
    parts = ops.reshape(_normed(ops.reshape(y, shape=ANY("parts"))), shape=ANY())
    return ops.mul(either(parts, _normed(y)), value("gate"))


def _step(match: dict[str, Any], own: str) -> tuple[Value, dict[str, Any]]:
    """The operand of a step size, and the bias and softplus that are taken of it."""
    if own in match:
        return match[own], {}
    return match["delta"], {"bias": match.get("bias"), "softplus": True}


def _rates(match: dict[str, Any]) -> tuple[Value, dict[str, Any]]:
    return (match["a"], {}) if "a" in match else (match["a_log"], {"log_a": True})


def _fused_selective(**match: Any) -> Value:
    (delta, more), (a, log) = _step(match, "step"), _rates(match)
    norms: dict[str, Any] = {f"{n}_norm": True for n in "bc" if f"{n}_eps" in match}
    norms |= given(match, "b_eps", "b_weight", "c_eps", "c_weight")
    if "weight" in match:
        norms |= {"weight": match["weight"]} | (
            {"kind": "rms", **given(match, "eps", "norm_weight")} if "eps" in match else {}
        )
    operands = match["x"], delta, a, match["b"], match["c"], match.get("d")
    return ops.gated_selective_scan(*operands, gate=match.get("gate"), **more, **log, **norms)


def _fused_ssd(**match: Any) -> Value | Refusal:
    heads, x, parts = match["heads"], match["x"], match.get("parts", (0, 0, 1, 0))
    if len(parts) != 4 or not isinstance(parts[2], int) or heads % parts[2]:
        return Refusal("its norm is none of whole heads")
    if "gate" in match and match["gate"].shape != x.shape:
        return Refusal("its gate is not like what it opens")
    if "parts" in match and match["norm_weight"].shape != x.shape[-1:]:
        return Refusal("its norm has another weight than one number for each")
    (delta, more), (a, log) = _step(match, "step"), _rates(match)
    norm = {"norm": True, "norm_groups": parts[2], **given(match, "eps", "norm_weight")} if "eps" in match else {}
    operands = x, delta, a, match["b"], match["c"], match.get("d")
    return ops.gated_ssd(*operands, gate=match.get("gate"), **given(match, *ops.ssd.attrs), **more, **log, **norm)


def _fused_matrix(units: bool, **match: Any) -> Value | Refusal:
    heads, groups, q, v, gate = match["heads"], match["groups"], match["q"], match["v"], match.get("gate")
    decay, more = (match.get("decay"), {})
    if "delta" in match:
        decay, bias, a_log = match["delta"], match.get("bias"), match["a_log"]
        more = {"a_log": a_log, "bias": bias}
        if len(decay.shape) != 3 or a_log.shape != (heads,) or decay.shape[2] % heads:
            return Refusal("its decay is not one of its heads")
    if units and any(match[f"{n}_parts"][2:] != (groups, match[n].width // groups) for n in "qk"):
        return Refusal("its queries and keys are not normed head by head")
    parts = match.get("parts", (0, 0, 1, 0))
    if gate is not None and (
        gate.shape != v.shape or len(parts) != 4 or not isinstance(parts[2], int) or heads % parts[2]
    ):
        return Refusal("its gate or its norm is none of whole heads")
    named = given(match, "heads", "groups", "beta", "q_scale", "k_scale", "beta_scale")
    named |= {"unit": True, "unit_eps": match["unit_eps"]} if units else {}
    named |= {"norm": True, "norm_groups": parts[2], **given(match, "eps", "norm_weight")} if "eps" in match else {}
    return ops.matrix_recurrence(q, match["k"], v, decay, gate=gate, **named, **more)


MATRICES = {ops.gated_linear_attention: "linear attention", ops.gated_delta_rule: "delta rule"}
ROWS: dict[str, tuple[Callable[[], Value], Callable[..., Any]]] = {
    "Mamba, gated": (lambda: _gated(_selective()), _fused_selective),
    "Mamba": (_selective, _fused_selective),
    "Mamba-2, gated and normed": (lambda: _normed(_gated(_ssd())), _fused_ssd),
    "Mamba-2, gated and normed by parts": (lambda: _normed_by_parts(_gated(_ssd())), _fused_ssd),
    "Mamba-2, gated": (lambda: _gated(_ssd()), _fused_ssd),
    "Mamba-2": (_ssd, _fused_ssd),
    **{
        f"{name}{', normed queries and keys' * units}{', normed and gated' * ends}": (
            partial(_ended if ends else _matrix, op, units),
            partial(_fused_matrix, units),
        )
        for op, name in MATRICES.items()
        for ends in (True, False)
        for units in (True, False)
    },
}


@dataclass(frozen=True)
class FuseRecurrence(Pass):
    """Compute a recurrence with what makes its operands and what gates and norms its result.

    selective_scan, ssd, gated_linear_attention and gated_delta_rule become gated_selective_scan, gated_ssd and
    matrix_recurrence, which take up the projection and softplus of step sizes, rates −e^a, norms and factors of queries
    and keys, gates and the norms of parts of the result.

    Condition: nothing else reads what is taken up.

    Source: Mamba (Gu & Dao 2023), Mamba-2 (Dao & Gu 2024), Gated DeltaNet (Yang 2024).

    Example fuse-recurrence::

        graph example {
          input %x: f32[batch, seq, 4]
          input %delta: f32[batch, seq, 4]
          input %b: f32[batch, seq, 3]
          input %c: f32[batch, seq, 3]
          input %gate: f32[batch, seq, 4]
          param %a_log: f32[4, 3] = normal([4, 3], std=0.5, stream="a")
          %rate: f32[4, 3] = exp(%a_log)
          %a: f32[4, 3] = neg(%rate)
          %step: f32[batch, seq, 4] = softplus(%delta)
          %scan: f32[batch, seq, 4] = selective_scan(%x, %step, %a, %b, %c)
          %open: f32[batch, seq, 4] = swish(%gate)
          %y: f32[batch, seq, 4] = mul(%scan, %open)
          output y = %y
        }
    """

    name = "fuse-recurrence"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("fuse-norm-linear", "fuse-qkv")
    on_fused = True

    def run(self, graph: Graph, trace: Trace) -> None:
        there = {node.op for node in graph.nodes}
        for name, (pattern, fused) in ROWS.items():
            traced = Pattern(pattern)
            if {ops.selective_scan, ops.ssd, *MATRICES} & there:
                apply_rules(graph, [Rule(name, traced, fused)], trace)
