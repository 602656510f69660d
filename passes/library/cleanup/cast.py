"""The cast of a model to another dtype."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import DType, Graph, Node, Param, Value, WeftError, ops
from weft.ir.op import Trait
from weft.ir.ops.loops import cast_step

from ...analysis.states import sum_operands
from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.trace import Trace


@dataclass(frozen=True)
class CastDtype(Pass):
    """Convert floating-point parameters, inputs and values to `dtype` (f16, bf16, f32).

    Positions stay in f32: the frequencies of rope, and values that are computed elementwise from integers cast to
    float, until they are combined with other values. States that accumulate all tokens also stay in f32. Weights are
    rounded once, when they are written.

    Condition: values stay within the range of `dtype`, which is ±65,504 for f16.

    Source: Micikevicius 2018, arXiv:1710.03740; Kalamkar 2019, arXiv:1905.12322.

    Example cast{dtype=bf16}::

        graph example {
          input %ids: i64[batch, seq]
          param %embed: f32[11, 4] = normal([11, 4], std=1.0, stream="embed")
          param %w: f32[6, 4] = normal([6, 4], std=0.5, stream="w")
          %x: f32[batch, seq, 4] = embedding(%ids, %embed)
          %y: f32[batch, seq, 6] = linear(%x, %w)
          output y = %y
        }
    """

    name = "cast"
    effect = "lossy"
    purpose = "Numbers"
    on_fused = True
    tradeoff = "casts between the model and the values that stay in f32"
    dtype: DType

    def run(self, graph: Graph, trace: Trace) -> None:
        if not self.dtype.is_float or self.dtype.bits < 16:
            raise WeftError(f"cast: no model computes in {self.dtype}; choose f16, bf16 or f32")
        wide = _find_f32_values(graph)
        # The types before the cast, for copies of parameters that positions also read.
        types = {p: p.type for p in graph.params.values()}
        for v in (*graph.inputs.values(), *graph.params.values()):
            if v not in wide and self._changes(v):
                trace.rewrites[self.name] += 1
                v.type = v.type.with_dtype(self.dtype)
        trace.note(f"{self.name}: {trace.rewrites[self.name]} parameters and inputs to {self.dtype}")
        lowered: dict[Value, Value] = {}
        copies: dict[Param, Param] = {}
        for node in graph.nodes:
            is_wide = node.output in wide
            for i, operand in enumerate(node.inputs):
                if operand is None or _stays_f32(node, i):
                    continue
                if operand in wide and not is_wide:
                    node.set_input(i, self._lower(graph, node, operand, lowered))
                elif is_wide and isinstance(operand, Param) and operand.type != types.get(operand, operand.type):
                    if operand not in copies:
                        type = types[operand]
                        copies[operand] = graph.add_param(f"{operand.name}.{type.dtype}", type, operand.recipe)
                    node.set_input(i, copies[operand])
            if node.op is ops.scan:  # the step still computes in its own dtypes
                read = [v.type.dtype for v in node.inputs if v is not None]
                node.attrs["step"] = cast_step(node.attrs["step"], read)
            output_types = node.op.types([None if v is None else v.type for v in node.inputs], node.attrs)
            for v, t in zip(node.outputs, output_types, strict=True):
                v.type = t

    def _changes(self, v: Value) -> bool:
        return v.type.dtype.is_float and v.type.dtype.bits >= 16 and v.type.dtype != self.dtype

    def _lower(self, graph: Graph, reader: Node, value: Value, lowered: dict[Value, Value]) -> Value:
        if not self._changes(value):
            return value
        if value not in lowered:
            # Before the first reader in execution order, so that all later ones can read it.
            with graph.inserting(before=reader):
                lowered[value] = ops.cast(value, to=self.dtype)
        return lowered[value]

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Exact arithmetic knows no dtypes: the outputs are the same."""
        inputs = equivalence.inputs(before)
        equivalence.same(equivalence.run(before, inputs), equivalence.run(after, inputs), EXACT)


def _stays_f32(node: Node, operand: int) -> bool:
    """Return whether operand number `operand` of `node` stays f32: rotary frequencies, cache scales, state sums."""
    frequencies = node.op is ops.rope and node.op.operands[operand].name == "frequencies"
    codes = node.op is ops.attention and node.op.operands[operand].name in ("k_scale", "v_scale")
    return frequencies or codes or operand in sum_operands(node)


def _find_f32_values(graph: Graph) -> set[Value]:
    """Return the values that stay f32: operands of `_stays_f32`, floats computed from integers, and values computed
    from such values and parameters by elementwise ops and moves, including these parameters.
    """
    wide: set[Value] = set()
    for node in graph.nodes:
        wide.update(v for i, v in enumerate(node.inputs) if v is not None and _stays_f32(node, i))
        floats = [v for v in node.inputs if v is not None and v.type.dtype.is_float]
        if not node.output.type.dtype.is_float:
            continue
        if not floats or node.op is ops.cast:
            wide.update(node.outputs)
        elif {Trait.ELEMENTWISE, Trait.VIEW} & node.op.traits or node.op in (
            ops.expand,
            ops.concat,
            ops.slice_,
            ops.split,
        ):
            computed = [v for v in floats if v in wide and not isinstance(v, Param)]
            if computed and all(v in wide or isinstance(v, Param) for v in floats):
                wide.update(floats)
                wide.update(node.outputs)
    # A parameter with other readers is cast for them; positions read a copy of it.
    wide -= {v for v in wide if isinstance(v, Param) and any(not _keeps_f32(n, i, wide) for n, i in v.uses)}
    return wide


def _keeps_f32(node: Node, operand: int, wide: set[Value]) -> bool:
    return _stays_f32(node, operand) or node.output in wide
