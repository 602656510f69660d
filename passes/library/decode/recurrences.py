"""Recurrences of a decode step, fused with their step sizes, norms, decays and gates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from weft.ir import Graph, Value, ops
from weft.ir.op import Op

from ... import Pass, Refusal, Rule, Trace, apply_rules
from ...edits.pattern import ANY, Pattern, capture, either, maybe, param, value
from .products import bind_gain, select


def _build_scaled(y: Value, name: str) -> Value:
    return either(ops.affine(y, by=ANY(f"{name}_scale")), y)


def _build_rate() -> Value:
    return ops.neg(ops.exp(param("a_log")))


def _build_softplus(*inner: Value) -> Value:
    """Return a pattern of softplus whose argument is one of `inner`, or the step size `delta` with or without bias."""
    return ops.softplus(either(*inner, ops.add(value("delta"), param("bias")), value("delta")))


def _build_gated(y: Value) -> Value:
    return ops.mul(y, ops.swish(value("gate")))


def _build_normed(y: Value) -> Value:
    return ops.rms_norm(y, bind_gain("norm_weight"), eps=ANY("eps"))


def _build_normed_parts(y: Value) -> Value:
    parts = ops.rms_norm(ops.reshape(y, shape=ANY("parts")), None, eps=ANY("eps"))
    return ops.mul(ops.reshape(parts, shape=ANY()), param("norm_weight"))


def _build_selective() -> Value:
    rank = either(ops.rms_norm(value("delta"), bind_gain("norm_weight"), eps=ANY("eps")), value("delta"))
    delta = either(_build_softplus(ops.linear(rank, param("weight"), bind_gain("bias"))), value("step"))
    normed = ((value(n), ops.rms_norm(value(n), bind_gain(f"{n}_weight"), eps=ANY(f"{n}_eps"))) for n in "bc")
    b, c = (either(norm, plain) for plain, norm in normed)
    return ops.selective_scan(value("x"), delta, either(_build_rate(), value("a")), b, c, maybe("d"))


def _build_ssd() -> Value:
    delta, a = either(_build_softplus(), value("step")), either(_build_rate(), value("a"))
    operands = value("x"), delta, a, value("b"), value("c"), maybe("d")
    return ops.ssd(*operands, **capture(*ops.ssd.attrs))


def _build_matrix(op: Op, units: bool) -> Value:
    q, k = (_build_unit(name) if units else _build_scaled(value(name), name) for name in "qk")
    step = ops.reshape(_build_softplus(), shape=ANY("by_head"))
    by_key = ops.mul(step, ops.unsqueeze(_build_rate(), axes=ANY("axes")))
    decay = either(ops.reshape(by_key, shape=ANY()), ops.mul(_build_softplus(), _build_rate()), maybe("decay"))
    beta = [_build_scaled(value("beta"), "beta")] if op is ops.gated_delta_rule else []
    return op(q, k, value("v"), *beta, decay, **capture(*op.attrs))


def _build_unit(name: str) -> Value:
    normed = ops.rms_norm(ops.reshape(value(name), shape=ANY(f"{name}_parts")), None, eps=ANY("unit_eps"))
    return ops.reshape(_build_scaled(normed, name), shape=ANY())


def _build_gated_norm(op: Op, units: bool) -> Value:
    y = _build_matrix(op, units)
    parts = ops.reshape(_build_normed(ops.reshape(y, shape=ANY("parts"))), shape=ANY())
    return ops.mul(either(parts, _build_normed(y)), value("gate"))


def _find_step(match: dict[str, Any]) -> tuple[Value, dict[str, Any]] | Refusal:
    """Return (step size, fused op's arguments for bias and softplus, or {}); a Refusal if the bias does not fit."""
    if "step" in match:
        return match["step"], {}
    delta, bias, weight = match["delta"], match.get("bias"), match.get("weight")
    if bias is not None and bias.shape != (delta.shape[-1:] if weight is None else weight.shape[:1]):
        return Refusal(f"%{bias.name} is not a bias per feature of its step size")
    return delta, {"bias": bias, "softplus": True}


def _find_rates(match: dict[str, Any]) -> tuple[Value, dict[str, Any]]:
    return (match["a"], {}) if "a" in match else (match["a_log"], {"log_a": True})


def _fuse_selective(**match: Any) -> Value | Refusal:
    if isinstance(step := _find_step(match), Refusal):
        return step
    (delta, attrs), (a, log) = step, _find_rates(match)
    norms: dict[str, Any] = {f"{n}_norm": True for n in "bc" if f"{n}_eps" in match}
    norms |= select(match, "weight", "b_eps", "b_weight", "c_eps", "c_weight")
    if "weight" in match and "eps" in match:
        norms |= {"kind": "rms", **select(match, "eps", "norm_weight")}
    operands = match["x"], delta, a, match["b"], match["c"], match.get("d")
    return ops.gated_selective_scan(*operands, gate=match.get("gate"), **attrs, **log, **norms)


def _fuse_ssd(**match: Any) -> Value | Refusal:
    heads, x, parts = match["heads"], match["x"], match.get("parts", (0, 0, 1, 0))
    if len(parts) != 4 or not isinstance(parts[2], int) or heads % parts[2]:
        return Refusal("its norm does not cover complete heads")
    if "gate" in match and match["gate"].shape != x.shape:
        return Refusal("its gate differs in shape from the values that it multiplies")
    if "parts" in match and match["norm_weight"].shape != x.shape[-1:]:
        return Refusal("the weight of its norm is not one value per feature")
    if isinstance(step := _find_step(match), Refusal):
        return step
    (delta, attrs), (a, log) = step, _find_rates(match)
    norm = {"norm": True, "norm_groups": parts[2], **select(match, "eps", "norm_weight")} if "eps" in match else {}
    operands = x, delta, a, match["b"], match["c"], match.get("d")
    return ops.gated_ssd(*operands, gate=match.get("gate"), **select(match, *ops.ssd.attrs), **attrs, **log, **norm)


def _fuse_matrix(units: bool, **match: Any) -> Value | Refusal:
    heads, groups, q, v, gate = match["heads"], match["groups"], match["q"], match["v"], match.get("gate")
    decay, attrs = match.get("decay"), {}
    if "delta" in match:
        step, by_head = _find_step(match), match.get("by_head")
        if isinstance(step, Refusal):
            return step
        decay, attrs = step[0], {"a_log": match["a_log"], "bias": step[1]["bias"]}
        width = decay.shape[-1] if len(decay.shape) == 3 else 0
        if by_head is not None and by_head[2:] == (heads, width // heads) and match["axes"] in ((1,), (-1,)):
            width = heads
        if width != heads or match["a_log"].shape != (heads,):
            return Refusal("its decay is not one value per head")
    if units and any(match[f"{n}_parts"][2:] != (groups, match[n].width // groups) for n in "qk"):
        return Refusal("its queries and keys are not normed head by head")
    parts = match.get("parts", (0, 0, 1, 0))
    covers_heads = len(parts) == 4 and isinstance(parts[2], int) and heads % parts[2] == 0
    if gate is not None and (gate.shape != v.shape or not covers_heads):
        return Refusal("its gate or its norm does not fit its heads")
    named = select(match, "heads", "groups", "beta", "q_scale", "k_scale", "beta_scale")
    named |= {"unit": True, "unit_eps": match["unit_eps"]} if units else {}
    named |= {"norm": True, "norm_groups": parts[2], **select(match, "eps", "norm_weight")} if "eps" in match else {}
    return ops.matrix_recurrence(q, match["k"], v, decay, gate=gate, **named, **attrs)


# By op, patterns with their rewrites; patterns with the most nodes around the op come first.
REWRITES: dict[Op, dict[str, tuple[Callable[[], Value], Callable[..., Any]]]] = {
    ops.selective_scan: {
        "Mamba, gated": (lambda: _build_gated(_build_selective()), _fuse_selective),
        "Mamba": (_build_selective, _fuse_selective),
    },
    ops.ssd: {
        "Mamba-2, gated and normed": (lambda: _build_normed(_build_gated(_build_ssd())), _fuse_ssd),
        "Mamba-2, gated and normed by parts": (lambda: _build_normed_parts(_build_gated(_build_ssd())), _fuse_ssd),
        "Mamba-2, gated": (lambda: _build_gated(_build_ssd()), _fuse_ssd),
        "Mamba-2": (_build_ssd, _fuse_ssd),
    },
    **{
        op: {
            f"{name}{', normed queries and keys' * units}{', normed and gated' * ends}": (
                partial(_build_gated_norm if ends else _build_matrix, op, units),
                partial(_fuse_matrix, units),
            )
            for ends in (True, False)
            for units in (True, False)
        }
        for op, name in {ops.gated_linear_attention: "linear attention", ops.gated_delta_rule: "delta rule"}.items()
    },
}


class FuseRecurrence(Pass):
    """Compute a recurrence together with its step sizes, decays and norms, and the gate and norm of its result.

    selective_scan becomes gated_selective_scan, ssd becomes gated_ssd, and gated_linear_attention and gated_delta_rule
    become matrix_recurrence. These ops include the projection and softplus of step sizes, rates −e^a, norms and factors
    of queries and keys, the gate, and the norm of the result (over all features, or per group of heads).

    Condition: the fused values have no other readers; the weights of norms are parameters.

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
        for op in dict.fromkeys(node.op for node in graph.nodes):
            for name, (pattern, fused) in REWRITES.get(op, {}).items():
                apply_rules(graph, [Rule(name, Pattern(pattern), fused)], trace)
