"""Lowerings of recurrences, with work linear in the length, a state of constant size, and a fixed number of nodes.

ONNX Runtime's LinearAttention runs the recurrence of a head in one kernel. In standard operators, linear attention with
at most one decay per head scans over chunks of tokens, in parallel within a chunk; other recurrences scan over tokens.
So does Mamba on every CPU target: its state stays in the CPU cache, which makes it ten times as fast as LinearAttention
with a decay per key.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as onnx

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.ir.recipes import Permute, Reshape, Slice
from weft.ir.types import dtypes
from weft.ir.types.sizes import Size

from ...target import Backend
from ..lowering import contrib, contrib_on, lowering, on_cpu, standard
from ..onnx_emitter import OnnxEmitter
from .layers import BODIES, MS, emit_activation

CHUNK = 32  # tokens in a chunk of the parallel form

Out = onnx.Value


def to_f32(e: OnnxEmitter, value: Value | None) -> Any:
    """Return the ONNX value of `value`; on CPUs cast to f32, because states sum many terms and kernels lack f16."""
    out = e[value]
    is_narrow = value is not None and value.type.dtype != dtypes.f32 and e.target.device == "cpu"
    return e.cast(out, dtypes.f32) if is_narrow else out


def cast_results(e: OnnxEmitter, node: Node, results: list[Out]) -> list[Out]:
    """Return the first of `results`, one per output of `node`; on CPUs cast from f32 to the dtypes of its outputs."""
    wanted = [value.type.dtype for value in node.outputs]
    on_cpu = e.target.device == "cpu"
    return [e.cast(v, d) if on_cpu and d != dtypes.f32 else v for v, d in zip(results, wanted, strict=False)]


def emit_zeros(e: OnnxEmitter, batch: Size, *tail: int) -> Any:
    """Return f32 zeros [batch, *tail]."""
    zero = onnx.tensor([0.0], dtype=onnx.DataType.FLOAT)  # explicit, because tract takes f64 by default
    return e.op("ConstantOfShape", e.op("Concat", e.size(batch), e.constant(tail), axis=0), value=zero)


def emit_initial_state(e: OnnxEmitter, node: Node, past: Any, *tail: int) -> Any:
    """Return the initial state [batch, *tail] of `node`: `past` reshaped, or f32 zeros if `past` is None."""
    return emit_zeros(e, node.output.shape[0], *tail) if past is None else e.op("Reshape", past, e.constant([0, *tail]))


# -- linear attention and the delta rule


def _list_operands(e: OnnxEmitter, node: Node) -> tuple[Any, ...]:
    """Return q, k, v, beta, decay and past of `node` as ONNX values, on CPUs in f32; None for absent ones."""
    names = ("q", "k", "v", *(("beta",) * (node.op is ops.gated_delta_rule)), "decay", "past")
    q, k, v, *beta, decay, past = (to_f32(e, node.operand(n)) for n in names)
    return q, k, v, beta[0] if beta else None, decay, past


def get_head_sizes(node: Node) -> tuple[int, int, int, int]:
    """Return (number of groups of q and k, number of heads, key size of a head, value size of a head)."""
    groups, heads = node.attrs["groups"], node.attrs["heads"]
    return groups, heads, node.required_operand("q").width // groups, node.output.width // heads


@lowering(ops.gated_linear_attention, ops.gated_delta_rule, targets=contrib)
def LinearAttention(e: OnnxEmitter, node: Node) -> list[Out]:
    (q, k, v, beta, decay, past), (groups, heads, d, dv) = _list_operands(e, node), get_head_sizes(node)
    if past is None and node.output.type.dtype != dtypes.f32:  # the kernel sums in the type of the past
        past = emit_zeros(e, node.output.shape[0], heads, d, dv)
    plain, gated = ("linear", "gated") if beta is None else ("delta", "gated_delta")
    rule: dict[str, Any] = {"update_rule": plain if decay is None else gated, "scale": 1.0}
    operands = (q, k, v, past, decay, *([] if beta is None else [beta]))
    sizes: dict[str, Any] = {"q_num_heads": groups, "kv_num_heads": heads}
    return cast_results(e, node, e.many("LinearAttention", *operands, domain=MS, outputs=2, **sizes, **rule))


def _find_decay_refusal(node: Node, target: Backend) -> str | None:
    decay = node.operand("decay")
    return "it has a decay per key" if decay is not None and decay.width != node.attrs["heads"] else None


@lowering(ops.gated_linear_attention, targets=standard, when=_find_decay_refusal)
def ChunkScan(e: OnnxEmitter, node: Node) -> list[Out]:
    (q, k, v, _, decay, past), (groups, heads, d, dv) = _list_operands(e, node), get_head_sizes(node)
    chunks, grid = _Chunks(e, node.output.shape[1]), [groups, heads // groups]
    parts = [chunks.cut(q, groups, 1, d), chunks.cut(k, groups, 1, d), chunks.cut(v, *grid, dv)]
    if decay is not None:
        parts.append(chunks.cut(decay, *grid, 1))
    state, y = e.scan(chunks.step, [emit_initial_state(e, node, past, *grid, d, dv)], parts)
    y = chunks.join(y, heads * dv)
    return cast_results(e, node, [y, e.op("Reshape", state, e.constant([0, heads, d, dv]))])


@lowering(ops.gated_linear_attention, ops.gated_delta_rule, targets=standard)
def HeadScan(e: OnnxEmitter, node: Node) -> list[Out]:
    """Scan token by token: a step is a few products with the state, which stays in the CPU cache."""
    (q, k, v, beta, decay, past), (groups, heads, d, dv) = _list_operands(e, node), get_head_sizes(node)
    grid = [groups, heads // groups]

    def step(state: Any, q: Any, k: Any, v: Any, *others: Any) -> tuple[Any, Any]:
        """Advance `state` [batch, groups, heads of a group, d, dv] by a token; the heads of a group share q and k."""
        if decay is not None:
            state = e.op("Mul", others[-1], state)
        if beta is not None:
            v = e.op("Mul", others[0], e.op("Sub", v, e.op("MatMul", k, state)))
        column = e.op("Transpose", k, perm=[0, 1, 2, 4, 3])
        state = e.op("Add", state, e.op("Mul", column, v))
        return state, e.op("MatMul", q, state)

    row = [groups, 1, 1, d]
    shapes = [(q, row), (k, row), (v, [*grid, 1, dv])]
    if beta is not None:
        shapes.append((beta, [*grid, 1, 1]))
    if decay is not None:
        gates = node.required_operand("decay").width // heads
        shapes.append((e.op("Exp", decay), [*grid, gates, 1]))
    parts = [e.op("Reshape", x, e.constant([0, 0, *shape])) for x, shape in shapes]
    state, y = e.scan(step, [emit_initial_state(e, node, past, *grid, d, dv)], parts)
    y = e.op("Reshape", y, e.constant([0, 0, heads * dv]))
    return cast_results(e, node, [y, e.op("Reshape", state, e.constant([0, heads, d, dv]))])


class _Chunks:
    """The split of tensors [batch, seq, …] into chunks of min(seq, CHUNK) tokens, [batch, chunks, tokens, …], and the
    parallel form of a recurrence within a chunk."""

    def __init__(self, e: OnnxEmitter, seq: Size) -> None:
        self.e, self.seq = e, e.size(seq)
        self.tokens, self.padding, self.upto, self.before, self.after = e.memo(("chunks", seq), self._measure)

    def _measure(self) -> tuple[Any, ...]:
        """Return the number of tokens per chunk [1], the padding [1] after seq, and three f32 matrices
        [t, s] that are 1 where s ≤ t, where s < t, and where s > t, else 0."""
        e = self.e
        tokens = e.op("Min", self.seq, e.constant([CHUNK]))
        missing = e.op("Mod", e.op("Neg", self.seq), tokens)
        at = e.range(tokens)
        t, s = e.op("Unsqueeze", at, e.constant([1])), e.op("Unsqueeze", at, e.constant([0]))
        kinds = "LessOrEqual", "Less", "Greater"
        masks = (e.cast(e.op(kind, s, t), dtypes.f32) for kind in kinds)
        return (tokens, missing, *masks)

    def cut(self, x: Any, *tail: int) -> Any:
        """Return x [batch, seq, width] as [batch, chunks, tokens, *tail], zero-padded at the end of seq."""
        e = self.e
        padded = e.pad(x, (0, self.padding), 1, 3, dtypes.f32)
        return e.op("Reshape", padded, e.op("Concat", e.constant([0, -1]), self.tokens, e.constant(tail), axis=0))

    def join(self, y: Any, width: int) -> Any:
        """Return y [batch, chunks, tokens, …] as [batch, seq, width], without the padding."""
        e = self.e
        return e.op("Slice", e.op("Reshape", y, e.constant([0, -1, width])), e.constant([0]), self.seq, e.constant([1]))

    def step(self, state: Any, q: Any, k: Any, v: Any, decay: Any = None) -> tuple[Any, Any]:
        """Return (the state after one chunk, the outputs of its tokens). `state` is [batch, groups, heads of a group,
        d, dv]; q and k are [batch, tokens, groups, 1, d]; v, the outputs and decay are [batch, tokens, groups, heads of
        a group, dv or 1 for decay]. The decay from one token to another is summed from the terms between them: a
        difference of cumulative sums would lose small decays next to large ones."""
        e = self.e
        q, v = (e.op("Transpose", x, perm=[0, 2, 3, 1, 4]) for x in (q, v))
        k = e.op("Transpose", k, perm=[0, 2, 3, 4, 1])
        scores = e.op("MatMul", q, k)
        old = e.op("MatMul", q, state)
        decayed, written = state, v
        seen = self.upto
        if decay is not None:
            decay = e.op("Transpose", decay, perm=[0, 2, 3, 1, 4])
            between = e.op("MatMul", self.upto, e.op("Mul", decay, self.before))
            seen = e.op("Mul", e.op("Exp", between), self.upto)
            old = e.op("Mul", old, e.op("Exp", e.op("MatMul", self.upto, decay)))
            written = e.op("Mul", v, e.op("Exp", e.op("MatMul", self.after, decay)))
            decayed = e.op("Mul", state, e.op("Exp", e.op("ReduceSum", decay, e.constant([3]))))
        y = e.op("Add", old, e.op("MatMul", e.op("Mul", scores, seen), v))
        state = e.op("Add", decayed, e.op("MatMul", k, written))
        return state, e.op("Transpose", y, perm=[0, 3, 1, 2, 4])


# -- Mamba


@lowering(ops.selective_scan, targets=on_cpu)
def TokenScan(e: OnnxEmitter, node: Node) -> list[Out]:
    x, delta, b, c, d, past = (to_f32(e, node.operand(n)) for n in ("x", "delta", "b", "c", "d", "past"))
    a = node.required_operand("a")
    channels, states = a.shape
    assert isinstance(channels, int) and isinstance(states, int)
    if isinstance(a, Param):
        # [states, channels] as in the state, so that c · state is one MatMul.
        rates: Any = e.weight(f"{a.name}.T", Permute(a.recipe, (1, 0)), dtypes.f32)
    else:
        rates = e.op("Transpose", to_f32(e, a), perm=[1, 0])

    def step(state: Any, delta: Any, driven: Any, b: Any, c: Any) -> tuple[Any, Any]:
        decayed = e.op("Mul", e.op("Exp", e.op("Mul", delta, rates)), state)  # [batch, states, channels]
        state = e.op("Add", decayed, e.op("Mul", b, driven))
        return state, e.op("MatMul", c, state)

    # Terms that do not depend on the state are computed for all tokens at once, outside of the Scan.
    parts = [e.op("Unsqueeze", v, e.constant([2])) for v in (delta, e.op("Mul", delta, x))]
    parts += [e.op("Unsqueeze", b, e.constant([3])), e.op("Unsqueeze", c, e.constant([2]))]
    state, y = e.scan(step, [emit_initial_state(e, node, past, states, channels)], parts)
    y = e.op("Squeeze", y, e.constant([2]))
    return cast_results(e, node, [y if d is None else e.op("Add", y, e.op("Mul", x, d)), state])


# -- short convolutions


def _find_kernel_refusal(node: Node, target: Backend) -> str | None:
    name = node.attrs["activation"]
    if name not in ("identity", "silu"):
        return f"the kernel has no activation {name}"
    return None if isinstance(node.inputs[1], Param) else "its weight is not a parameter"


@lowering(ops.causal_conv, targets=contrib_on("cuda"), when=_find_kernel_refusal)
def CausalConvWithState(e: OnnxEmitter, node: Node) -> list[Out]:
    x, weight, bias, past = (node.operand(n) for n in ("x", "weight", "bias", "past"))
    assert isinstance(weight, Param)
    channels, width = weight.type.concrete({})
    name = {"identity": "none"}.get(node.attrs["activation"], node.attrs["activation"])
    results = e.many(
        "CausalConvWithState",
        e[x],
        e.weight(f"{weight.name}.3d", Reshape(weight.recipe, (channels, 1, width)), weight.type.dtype),
        e[bias],
        e[past],
        domain=MS,
        outputs=2,
        activation=name,
        channels_last=1,
    )
    return results[: len(node.outputs)]


def _find_taps_refusal(node: Node, target: Backend) -> str | None:
    if node.attrs["activation"] in BODIES:
        return f"no ONNX operator for {node.attrs['activation']}"
    return None if isinstance(node.inputs[1], Param) else "its weight is not a parameter"


@lowering(ops.causal_conv, targets=on_cpu, when=_find_taps_refusal)
def Taps(e: OnnxEmitter, node: Node) -> list[Out]:
    """Emit a product per tap: on CPUs as fast as Conv for many tokens, and as CausalConvWithState for one."""
    x, weight, bias, past = node.required_operand("x"), *(node.operand(n) for n in ("weight", "bias", "past"))
    assert isinstance(weight, Param)
    channels, width = weight.type.concrete({})
    dtype, seq = x.type.dtype, x.shape[1]
    padded = e.pad(e[x], (width - 1, 0), 1, 3, dtype) if past is None else e.op("Concat", e[past], e[x], axis=1)
    length = e.size(seq)

    def rows(start: int) -> Any:
        stop = length if start == 0 else e.memo(("rows", seq, start), lambda: e.op("Add", length, e.constant([start])))
        return e.op("Slice", padded, e.constant([start]), stop, e.constant([1]))

    y = None
    for j in range(width):
        tap = e.weight(f"{weight.name}.{j}", Reshape(Slice(weight.recipe, 1, j, j + 1), (channels,)), dtype)
        term = e.op("Mul", rows(j), tap)
        y = term if y is None else e.op("Add", y, term)
    assert y is not None
    y = emit_activation(e, y if bias is None else e.op("Add", y, e[bias]), node.attrs["activation"], dtype)
    # The next call begins with the last width − 1 inputs, which are the rows from `length` on.
    return [y] if past is None else [y, e.op("Slice", padded, length, e.constant([2**63 - 1]), e.constant([1]))]
