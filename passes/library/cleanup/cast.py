"""Choosing the dtype of a model."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import DType, Graph, Node, Param, Value, WeftError, ops
from weft.ir.op import Trait
from weft.ir.ops.loops import beside

from ...analysis.states import sums
from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.trace import Trace


@dataclass(frozen=True)
class Cast(Pass):
    """Turn floating-point parameters, inputs and values into `dtype` (f16, bf16, f32).

    Positions stay in f32: the frequencies of rope, and what is computed elementwise from integers made float, until
    it meets other values. So do states that add up all tokens. Weights are rounded once, when written.

    Condition: numbers stay within the range of `dtype`, which is ±65,504 for f16.

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
    tradeoff = "casts between the model and what stays in f32"
    dtype: DType

    def run(self, graph: Graph, trace: Trace) -> None:
        if not self.dtype.is_float or self.dtype.bits < 16:
            raise WeftError(f"cast: no model computes in {self.dtype}; choose f16, bf16 or f32")
        kept = _positional(graph)
        # The types before the cast, for twins of parameters that positions read too.
        types = {p: p.type for p in graph.params.values()}
        for v in (*graph.inputs.values(), *graph.params.values()):
            if v not in kept and self._changes(v):
                trace.rewrites[self.name] += 1
                v.type = v.type.with_dtype(self.dtype)
        trace.note(f"{self.name}: {trace.rewrites[self.name]} parameters and inputs to {self.dtype}")
        lowered: dict[Value, Value] = {}
        twins: dict[Param, Param] = {}
        for node in graph.nodes:
            outputs_kept = node.output in kept
            for i, operand in enumerate(node.inputs):
                if operand is None or _wide(node, i):
                    continue
                if operand in kept and not outputs_kept:
                    node.set_input(i, self._lower(graph, node, operand, lowered))
                elif outputs_kept and isinstance(operand, Param) and operand.type != types.get(operand, operand.type):
                    if operand not in twins:
                        first = types[operand]
                        twins[operand] = graph.add_param(f"{operand.name}.{first.dtype}", first, operand.recipe)
                    node.set_input(i, twins[operand])
            if node.op is ops.scan:  # it computes as before, whatever it reads
                read = [v.type.dtype for v in node.inputs if v is not None]
                node.attrs["step"] = beside(node.attrs["step"], read)
            found = node.op.types([None if v is None else v.type for v in node.inputs], node.attrs)
            for v, t in zip(node.outputs, found, strict=True):
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


def _wide(node: Node, operand: int) -> bool:
    """Return whether the operand stays f32 beside narrower ones: rotary frequencies, scales of caches, sums over all
    tokens."""
    frequencies = node.op is ops.rope and node.op.operands[operand].name == "frequencies"
    codes = node.op is ops.attention and node.op.operands[operand].name in ("k_scale", "v_scale")
    return frequencies or codes or operand in sums(node)


def _positional(graph: Graph) -> set[Value]:
    """Values that stay f32: frequencies of rope, sums over all tokens, floats made from integers and what is made
    elementwise from only those and parameters, with those parameters.
    """
    kept: set[Value] = set()
    for node in graph.nodes:
        kept.update(v for i, v in enumerate(node.inputs) if v is not None and _wide(node, i))
        floats = [v for v in node.inputs if v is not None and v.type.dtype.is_float]
        if not node.output.type.dtype.is_float:
            continue
        if not floats or node.op is ops.cast:
            kept.update(node.outputs)
        elif {Trait.ELEMENTWISE, Trait.VIEW} & node.op.traits or node.op in (
            ops.expand,
            ops.concat,
            ops.slice_,
            ops.split,
        ):
            inside = [v for v in floats if v in kept and not isinstance(v, Param)]
            if inside and all(v in kept or isinstance(v, Param) for v in floats):
                kept.update(floats)
                kept.update(node.outputs)
    # A parameter with other readers is cast for them; the positions get a twin of it.
    kept -= {v for v in kept if isinstance(v, Param) and any(not _keeps(n, i, kept) for n, i in v.uses)}
    return kept


def _keeps(node: Node, operand: int, kept: set[Value]) -> bool:
    return _wide(node, operand) or node.output in kept
