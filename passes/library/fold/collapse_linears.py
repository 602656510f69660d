"""Products of linear maps, and sums of them, as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Recipe, Value, ops
from weft.ir.recipes import Add, Concat, Full, Permute, Reshape, Scale
from weft.ir.recipes.matrices import MatMul

from ...analysis.feed_forward import private, projected
from ...analysis.projections import take_apart
from ...core.base import Pass
from ...core.trace import Trace
from ...edits.edit import derive, drop_params, only_params, replace_param, replace_uses


@dataclass(frozen=True)
class Chain:
    """A linear map weight x + bias, computed by `nodes`: linears and multiplications by a number, the last first."""

    x: Value
    weight: Recipe
    bias: Recipe | None
    nodes: tuple[Node, ...]

    @property
    def linears(self) -> list[Node]:
        return [n for n in self.nodes if n.op is ops.linear]

    @property
    def work(self) -> int:
        """Multiplications per row."""
        return sum(n.output.width * x.width for n in self.linears if (x := n.inputs[0]) is not None)


@dataclass(frozen=True)
class CollapseLinears(Pass):
    """Multiply weights that are applied one after the other, and add those that are applied side by side.

    B(A x + a) + b = (BA) x + (Ba + b), where BA costs no more than A and B do; W x + s·B(A x) = (W + s·BA) x, which is
    how a low-rank adapter (LoRA) is merged; and an embedding behind which a linear widens the rows (Decoder or encoder
    with embed_dim) becomes a wide table, E[i] Wᵀ + b = (E Wᵀ + 1 bᵀ)[i].

    Condition: nothing stands between and nobody else reads in between. A map through a narrow middle stays, for its
    product would cost more; a table that is a head's weight too stays; a norm or added positions between an embedding
    and its linear (ALBERT) keep them apart.

    Source: LoRA (Hu 2021, 2106.09685), section 4.1; ALBERT (Lan 2019, 1909.11942) on factorized embeddings.

    Example collapse-linears::

        graph example {
          input %x: f32[batch, seq, 8]
          param %q.weight: f32[8, 8] = normal([8, 8], std=0.5, stream="q")
          param %a.weight: f32[2, 8] = normal([2, 8], std=0.5, stream="a")
          param %b.weight: f32[8, 2] = normal([8, 2], std=0.5, stream="b")
          %q: f32[batch, seq, 8] = linear(%x, %q.weight)
          %a: f32[batch, seq, 2] = linear(%x, %a.weight)
          %b: f32[batch, seq, 8] = linear(%a, %b.weight)
          %scaled: f32[batch, seq, 8] = affine(%b, by=2.0)
          %adapted: f32[batch, seq, 8] = add(%q, %scaled)
          output y = %adapted
        }
    """

    name = "collapse-linears"
    effect = "exact"
    purpose = "Fuse and take apart"
    tradeoff = "a factorized embedding becomes a table of the model's width: more bytes to store, fewer to compute"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            if node.op is ops.add:
                self._add(node, trace)
        for node in graph.nodes:
            if node.op is ops.linear:
                last = node
                while (product := self._multiply(last, trace)) is not None:
                    last = product
                self._tabulate(last, trace)

    def _add(self, node: Node, trace: Trace) -> None:
        """A sum of linear maps of the same value becomes one of them."""
        sides = _pair(node)
        if sides is None:
            return
        # The shorter chain gives the names: in W x + B(A x) that is W.
        base = min(sides, key=lambda chain: len(chain.nodes)).linears[0]
        merged, apart = node.output.width * sides[0].x.width, sum(chain.work for chain in sides)
        if merged > apart:
            trace.refuse(self.name, node.output.name, f"one product takes {merged} multiplications a row, not {apart}")
            return
        trace.fired(self.name, node.output.name)
        biases = tuple(chain.bias for chain in sides if chain.bias is not None)
        bias = Add(biases) if len(biases) > 1 else biases[0] if biases else None
        whole = Chain(
            sides[0].x, Add((sides[0].weight, sides[1].weight)), bias, (node, *sides[0].nodes, *sides[1].nodes)
        )
        _replace(whole, base)

    def _multiply(self, outer: Node, trace: Trace) -> Node | None:
        """A linear of a linear becomes one; returns it."""
        found = list(_chains(outer.output, None))
        if len(found) < 2:
            x = outer.inputs[0]
            if x is not None and x.producer is not None and x.producer.op is ops.linear and found:
                trace.refuse(
                    self.name, outer.output.name, f"%{x.name} is read by others too, or its weight is computed"
                )
            return None
        # found[0] is `outer` alone; found[1] takes in the linear before it.
        chain = found[1]
        merged = outer.output.width * chain.x.width
        if merged > chain.work:
            trace.refuse(
                self.name, outer.output.name, f"one product takes {merged} multiplications a row, not {chain.work}"
            )
            return None
        trace.fired(self.name, outer.output.name)
        return _replace(chain, outer)

    def _tabulate(self, outer: Node, trace: Trace) -> None:
        """A linear of rows that are looked up becomes a lookup of what it makes of them."""
        (chain, *_), rows = [*_chains(outer.output, None), None], outer.inputs[0]
        lookup = None if rows is None else rows.producer
        table = lookup.inputs[1] if lookup is not None and lookup.op is ops.embedding else None
        if chain is None or rows is None or lookup is None or not isinstance(table, Param):
            return
        others = [n for n in (*rows.users, *table.users) if n not in (outer, lookup)]
        if others or rows.is_output:
            reader = f"{others[0].op.name} (%{others[0].output.name})" if others else "the caller"
            trace.refuse(self.name, outer.output.name, f"%{table.name}, or what is looked up, is read by {reader} too")
            return
        trace.fired(self.name, outer.output.name)
        count, width = int(table.shape[0]), outer.output.width
        left: Recipe = table.recipe
        right: Recipe = Permute(chain.weight, (1, 0))
        if chain.bias is not None:  # [E 1] [Wᵀ; bᵀ]
            left = Concat((left, Full(1.0, (count, 1))), 1)
            right = Concat((right, Reshape(chain.bias, (1, width))))
        wide = derive(table, MatMul(left, right), (count, width))
        with outer.graph.inserting(before=lookup):
            y = ops.embedding(lookup.inputs[0], wide)
        outer.graph.replace(outer, y)
        outer.graph.erase(lookup)
        replace_param(table, wide)
        drop_params(outer.graph, outer.inputs)


def _chains(value: Value, reader: Node | None) -> Iterator[Chain]:
    """`value`, which nobody but `reader` reads, as a linear map of what is one linear back, two linears back …"""
    weight: Recipe | None = None
    bias: Recipe | None = None
    scale, nodes = 1.0, list[Node]()

    def scaled(recipe: Recipe) -> Recipe:
        return recipe if scale == 1 else Scale(recipe, scale)

    while (node := value.producer) is not None and (reader is None or private(value, reader)):
        x = node.inputs[0] if node.inputs else None
        if node.op not in (ops.linear, ops.affine) or node.attrs.get("plus") or x is None:
            return
        nodes.append(node)
        if node.op is ops.affine:
            scale *= node.attrs["by"]
        else:
            if not only_params(node.inputs[1:]):
                return
            step, added = (v.recipe if isinstance(v, Param) else None for v in (*node.inputs[1:], None)[:2])
            assert step is not None
            if added is not None:
                added = scaled(added if weight is None else MatMul(weight, added))
                bias = added if bias is None else Add((added, bias))
            weight = step if weight is None else MatMul(weight, step)
            yield Chain(x, scaled(weight), bias, tuple(nodes))
        reader, value = node, x


def _pair(node: Node) -> tuple[Chain, Chain] | None:
    """Both summands of `node` as linear maps of the same value, the nearest that there is. A piece of a packed linear
    is taken out of it first."""
    a, b = node.inputs
    if a is None or b is None or a is b or a.type != b.type:
        return None
    for one, other in ((a, b), (b, a)):
        piece = projected(one)
        if piece is None or not piece.packed or not private(one, node) or len(piece.node.output.users) > 1:
            continue
        if any(chain.x is piece.x for chain in _chains(other, node)) and one.producer is not None:
            take_apart(one.producer)
            return _pair(node)
    first, second = list(_chains(a, node)), list(_chains(b, node))
    return next(((p, q) for p in first for q in second if p.x is q.x), None)


def _replace(chain: Chain, base: Node) -> Node:
    """One linear, its parameters named like those of `base`, instead of the nodes of `chain`; returns it."""
    last, graph = chain.nodes[0], base.graph
    weight = base.inputs[1]
    assert isinstance(weight, Param)
    width = last.output.width
    given = [v for n in (base, *chain.nodes) if n.op is ops.linear and isinstance(v := n.operand("bias"), Param)]
    made = derive(weight, chain.weight, (width, chain.x.width))
    bias = None if chain.bias is None else derive(given[0], chain.bias, (width,))
    with graph.inserting(before=last):
        y = ops.linear(chain.x, made, bias)
    replace_uses(last.output, y)
    # `nodes` begin with the last, so each is erased after its reader.
    for node in chain.nodes:
        graph.erase(node)
    replace_param(weight, made)
    replace_param(given[0] if given else None, bias)
    drop_params(graph, [v for node in chain.nodes for v in node.inputs])
    assert y.producer is not None
    return y.producer
