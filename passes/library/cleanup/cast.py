"""The cast of a model to another dtype."""

from __future__ import annotations

from weft.ir import DType, Graph, Node, Param, Value, WeftError, ops
from weft.ir.op import Trait
from weft.ir.ops.loops import cast_step

from ... import Pass, Trace
from ...analysis.states import find_sum_operands
from ...core.equivalence import EXACT, EquivalenceCheck

_MOVES = (ops.expand, ops.concat, ops.slice_, ops.split)


class CastDtype(Pass):
    """Convert floating-point parameters, inputs and values to `dtype` (f16, bf16, f32).

    Positions stay in f32: the frequencies of rope, and values that are computed elementwise from integers cast to
    float, until they are combined with other values. Scales of quantized caches, and states that accumulate all tokens,
    also stay in f32. Weights are rounded once, when they are written.

    Condition: values stay within the range of `dtype`, which is ±65,504 for f16.

    Source: Micikevicius 2018, arXiv:1710.03740; Kalamkar 2019, arXiv:1905.12322.

    Example cast{dtype=bf16}, on the graph of pad-vocab.
    """

    name = "cast"
    effect = "lossy"
    purpose = "Numbers"
    on_fused = True
    tradeoff = "casts between the model and the values that stay in f32"
    dtype: DType

    def run(self, graph: Graph, trace: Trace) -> None:
        if not self.dtype.is_float or self.dtype.bits < 16:
            raise WeftError(f"cast: dtype={self.dtype} must be f16, bf16 or f32")
        f32 = _find_f32_values(graph)
        # The types before the cast, for copies of parameters that positions also read.
        types = {p: p.type for p in graph.params.values()}
        for v in (*graph.inputs.values(), *graph.params.values()):
            if v not in f32 and self._is_cast(v):
                trace.rewrites[self.name] += 1
                v.type = v.type.with_dtype(self.dtype)
        trace.note(f"{self.name}: {trace.rewrites[self.name]} parameters and inputs to {self.dtype}")
        casts: dict[Value, Value] = {}
        copies: dict[Param, Param] = {}
        for node in graph.nodes:
            is_f32 = node.output in f32
            for i, operand in enumerate(node.inputs):
                if operand is None or _is_f32_operand(node, i):
                    continue
                if operand in f32 and not is_f32:
                    node.set_input(i, self._cast_for_reader(graph, node, operand, casts))
                elif is_f32 and isinstance(operand, Param) and operand.type != types.get(operand, operand.type):
                    if operand not in copies:
                        type = types[operand]
                        copies[operand] = graph.add_param(f"{operand.name}.{type.dtype}", type, operand.recipe)
                    node.set_input(i, copies[operand])
            if node.op is ops.scan:  # the step still computes in its own dtypes
                operand_dtypes = [v.type.dtype for v in node.inputs if v is not None]
                node.attrs["step"] = cast_step(node.attrs["step"], operand_dtypes)
            output_types = node.op.types([None if v is None else v.type for v in node.inputs], node.attrs)
            for v, t in zip(node.outputs, output_types, strict=True):
                v.type = t

    def _is_cast(self, v: Value) -> bool:
        return v.type.dtype.is_float and v.type.dtype.bits >= 16 and v.type.dtype != self.dtype

    def _cast_for_reader(self, graph: Graph, reader: Node, value: Value, casts: dict[Value, Value]) -> Value:
        if not self._is_cast(value):
            return value
        if value not in casts:
            # Before the first reader in execution order, so that all later ones can read it.
            with graph.inserting(before=reader):
                casts[value] = ops.cast(value, to=self.dtype)
        return casts[value]

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that the outputs are equal in exact arithmetic, which ignores dtypes."""
        inputs = equivalence.make_inputs(before)
        equivalence.check_close(equivalence.run(before, inputs), equivalence.run(after, inputs), EXACT)


def _is_f32_operand(node: Node, operand: int) -> bool:
    """Return whether operand number `operand` of `node` stays f32: rotary frequencies, cache scales, state sums."""
    frequencies = node.op is ops.rope and node.op.operands[operand].name == "frequencies"
    codes = node.op is ops.attention and node.op.operands[operand].name in ("k_scale", "v_scale")
    return frequencies or codes or operand in find_sum_operands(node)


def _find_f32_values(graph: Graph) -> set[Value]:
    """Return the values that stay f32: operands for which `_is_f32_operand` holds, results of casts and of ops without
    float operands, and values computed from these and from parameters by elementwise ops and moves. A parameter is
    included only if all its readers stay f32."""
    f32: set[Value] = set()
    for node in graph.nodes:
        f32.update(v for i, v in enumerate(node.inputs) if v is not None and _is_f32_operand(node, i))
        floats = [v for v in node.inputs if v is not None and v.type.dtype.is_float]
        if not node.output.type.dtype.is_float:
            continue
        if not floats or node.op is ops.cast:
            f32.update(node.outputs)
        elif {Trait.ELEMENTWISE, Trait.VIEW} & node.op.traits or node.op in _MOVES:
            computed = [v for v in floats if v in f32 and not isinstance(v, Param)]
            if computed and all(v in f32 or isinstance(v, Param) for v in floats):
                f32.update(floats)
                f32.update(node.outputs)
    # A parameter with other readers is cast for them; positions read a copy of it.
    params = [v for v in f32 if isinstance(v, Param)]
    return f32.difference(v for v in params for n, i in v.uses if not (_is_f32_operand(n, i) or n.output in f32))
