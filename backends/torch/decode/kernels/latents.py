"""Latent attention as the decode step computes it: queries against latents, and the token's latent in its cache."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.passes.analysis.rotary import unlike

from ...kernels import latent_qk
from ..emitter import Refusal
from ..gates import maker
from ..patterns import NormOf, is_norm
from .products import few_rows


@dataclass(frozen=True)
class Absorbed:
    """All that `latent_qk` computes: heads `q` of plain and rotary numbers, of which the plain ones are multiplied by
    `weight`; the latent `kv`, of which `norm` takes the first numbers; and `rope`, which turns the others of both."""

    q: Value
    kv: Value
    weight: Param
    norm: NormOf
    rope: Node


def absorbed(node: Node) -> Absorbed | str:
    """The attention `node` with what makes its queries and keys; or why these are no one kernel."""
    keys = maker(node.operand("k"), ops.concat)
    c, turned = (None, None) if keys is None or len(keys.inputs) != 2 else keys.inputs
    k_rope = maker(turned, ops.rope)
    if c is None or k_rope is None:
        return "its keys are no latent beside what is turned"
    norm = _norm(c)
    if (kv := _halves(norm.x, k_rope.inputs[0])) is None:
        return "its latent, or the RMS norm of that, is not split from what is turned"
    both = maker(_flat(node.operand("q")), ops.concat)
    up, rope = (None, None) if both is None or len(both.inputs) != 2 else map(_flat, both.inputs)
    product, q_rope = maker(up, ops.head_linear), maker(rope, ops.rope)
    if product is None or q_rope is None or not product.attrs["inverse"]:
        return "its queries are not multiplied by a projection of keys"
    q, weight = _halves(_flat(product.inputs[0]), _flat(q_rope.inputs[0])), product.operand("weight")
    if (q := _flat(q)) is None or not isinstance(weight, Param):
        return "its queries are not multiplied by a weight"
    pairs = k_rope.operand("frequencies")
    if unlike(q_rope, k_rope) or pairs is None or k_rope.output.width != 2 * pairs.shape[-1]:
        return "queries and keys are not turned alike, and whole"
    return Absorbed(q, kv, weight, norm, k_rope)


def refusal(found: Absorbed, heads: int) -> Refusal:
    """Say why the kernel does not take it."""
    rows, rank = found.weight.type.concrete({})
    return lambda dtype: few_rows(dtype) or latent_qk.refusal(rank, rows // heads, found.rope.output.width, dtype)


def _norm(c: Value) -> NormOf:
    """A latent, or an RMS norm of one."""
    made = maker(c, ops.rms_norm)
    x = None if made is None or not is_norm(made) else made.inputs[0]
    return NormOf(c) if x is None else NormOf(x, made)


def _flat(value: Value | None) -> Value | None:
    """Return what `value` is another shape of."""
    node = maker(value, ops.reshape)
    return value if node is None else node.inputs[0]


def _halves(first: Value | None, second: Value | None) -> Value | None:
    """Return what is split into `first` and `second` along its last axis."""
    node = maker(first, ops.split)
    if node is None or node.outputs != (first, second) or node.attrs["axis"] not in (-1, len(node.output.shape) - 1):
        return None
    return node.inputs[0]
