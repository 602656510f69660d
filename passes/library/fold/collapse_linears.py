"""Products and sums of linear maps as one linear map."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Recipe, Value, ops
from weft.ir.recipes import Add, Concat, Full, Permute, Reshape, Scale
from weft.ir.recipes.matrices import MatMul

from ... import Pass, Trace
from ...analysis.feed_forward import find_projection, is_only_reader
from ...analysis.projections import split_linear
from ...edits.edit import are_params, derive_param, erase_unused_params, replace_param, replace_uses, require_param


@dataclass(frozen=True)
class Chain:
    """The linear map weight @ x + bias computed by `nodes`: linears and scalar factors, from last to first."""

    x: Value
    weight: Recipe
    bias: Recipe | None
    nodes: tuple[Node, ...]

    @property
    def linears(self) -> list[Node]:
        return [n for n in self.nodes if n.op is ops.linear]

    @property
    def work(self) -> int:
        """The multiplications per token of the linears in `nodes`."""
        return sum(n.output.width * x.width for n in self.linears if (x := n.inputs[0]) is not None)


class CollapseLinears(Pass):
    """Multiply the weights of consecutive linears, and add the weights of parallel ones.

    B(A x + a) + b = (BA) x + (Ba + b) merges two linears if BA has no more weights than A and B. W x + s·B(A x) =
    (W + s·BA) x merges a low-rank adapter (LoRA). E[i] Wᵀ + b = (E Wᵀ + 1 bᵀ)[i] merges an embedding and the linear
    that widens its rows (a model with embed_dim) into one wide table.

    Condition: the linears are adjacent and the values between them have no other readers. Two linears through a narrow
    bottleneck stay, since their product would cost more. A table that is also a head's weight stays, and so does one
    with a norm or added positions before the linear (ALBERT).

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
                self._merge_sum(node, trace)
        for node in graph.nodes:
            if node.op is ops.linear:
                last = node
                while (product := self._merge_product(last, trace)) is not None:
                    last = product
                self._merge_table(last, trace)

    def _merge_sum(self, node: Node, trace: Trace) -> None:
        """Replace the add `node` by one linear if its operands are linear maps of one value and that costs no more."""
        chains = _find_matching_chains(node)
        if chains is None:
            return
        # The shorter chain provides the names: in W x + B(A x) that is W.
        base = min(chains, key=lambda chain: len(chain.nodes)).linears[0]
        merged, before = node.output.width * chains[0].x.width, sum(chain.work for chain in chains)
        if merged > before:
            trace.refuse(self.name, node.output.name, f"one product takes {merged} multiplications a row, not {before}")
            return
        trace.record_rewrite(self.name, node.output.name)
        biases = tuple(chain.bias for chain in chains if chain.bias is not None)
        bias = Add(biases) if len(biases) > 1 else biases[0] if biases else None
        weight, nodes = Add((chains[0].weight, chains[1].weight)), (node, *chains[0].nodes, *chains[1].nodes)
        _replace_chain(Chain(chains[0].x, weight, bias, nodes), base)

    def _merge_product(self, outer: Node, trace: Trace) -> Node | None:
        """Merge the linear `outer` with the linear before it (a scalar factor may be between); return the merged node.
        Return None without such a linear, if a value between has other readers, or if the product would cost more."""
        chains = list(_find_chains(outer.output, None))
        if len(chains) < 2:
            x = outer.inputs[0]
            if x is not None and x.producer is not None and x.producer.op is ops.linear and chains:
                trace.refuse(self.name, outer.output.name, f"%{x.name} has other readers, or its weight is computed")
            return None
        # chains[0] is `outer` alone; chains[1] includes the linear before it.
        chain = chains[1]
        merged = outer.output.width * chain.x.width
        if merged > chain.work:
            reason = f"one product takes {merged} multiplications a row, not {chain.work}"
            trace.refuse(self.name, outer.output.name, reason)
            return None
        trace.record_rewrite(self.name, outer.output.name)
        return _replace_chain(chain, outer)

    def _merge_table(self, outer: Node, trace: Trace) -> None:
        """Replace `outer`, if it is the only reader of an embedding, by an embedding of the table mapped by `outer`."""
        (chain, *_), rows = [*_find_chains(outer.output, None), None], outer.inputs[0]
        lookup = None if rows is None else rows.producer
        table = lookup.inputs[1] if lookup is not None and lookup.op is ops.embedding else None
        if chain is None or rows is None or lookup is None or not isinstance(table, Param):
            return
        other_readers = [n for n in (*rows.users, *table.users) if n not in (outer, lookup)]
        if other_readers or rows.is_output:
            reader = f"{other_readers[0].op.name} (%{other_readers[0].output.name})" if other_readers else "the caller"
            reason = f"%{table.name}, or the result of its lookup, is also read by {reader}"
            trace.refuse(self.name, outer.output.name, reason)
            return
        trace.record_rewrite(self.name, outer.output.name)
        count, width = int(table.shape[0]), outer.output.width
        table_recipe: Recipe = table.recipe
        map_recipe: Recipe = Permute(chain.weight, (1, 0))
        if chain.bias is not None:  # [E 1] [Wᵀ; bᵀ]
            table_recipe = Concat((table_recipe, Full(1.0, (count, 1))), 1)
            map_recipe = Concat((map_recipe, Reshape(chain.bias, (1, width))))
        wide_table = derive_param(table, MatMul(table_recipe, map_recipe), (count, width))
        with outer.graph.inserting(before=lookup):
            y = ops.embedding(lookup.inputs[0], wide_table)
        outer.graph.replace(outer, y)
        outer.graph.erase(lookup)
        replace_param(table, wide_table)
        erase_unused_params(outer.graph, outer.inputs)


def _find_chains(value: Value, reader: Node | None) -> Iterator[Chain]:
    """Yield `value` as a linear map of the input of the linear before it, then of the linear before that, and so on.
    The walk goes back through linears and scalar factors. It ends at other ops, and at values with other readers:
    `value` may be read by `reader` only (None: by any node), each earlier value by the next node only."""
    weight: Recipe | None = None
    bias: Recipe | None = None
    scale, nodes = 1.0, list[Node]()

    def apply_scale(recipe: Recipe) -> Recipe:
        return recipe if scale == 1 else Scale(recipe, scale)

    while (node := value.producer) is not None and (reader is None or is_only_reader(value, reader)):
        x = node.inputs[0] if node.inputs else None
        if node.op not in (ops.linear, ops.affine) or node.attrs.get("plus") or x is None:
            return
        nodes.append(node)
        if node.op is ops.affine:
            scale *= node.attrs["by"]
        else:
            if not are_params(node.inputs[1:]):
                return
            step, added = (v.recipe if isinstance(v, Param) else None for v in (*node.inputs[1:], None)[:2])
            assert step is not None
            if added is not None:
                added = apply_scale(added if weight is None else MatMul(weight, added))
                bias = added if bias is None else Add((added, bias))
            weight = step if weight is None else MatMul(weight, step)
            yield Chain(x, apply_scale(weight), bias, tuple(nodes))
        reader, value = node, x


def _find_matching_chains(node: Node) -> tuple[Chain, Chain] | None:
    """Return both summands of the add `node` as linear maps of their nearest common value; None without such a value.
    If a summand is a piece of a packed linear, the linear is first split, in place."""
    a, b = node.inputs
    if a is None or b is None or a is b or a.type != b.type:
        return None
    for side, opposite in ((a, b), (b, a)):
        piece = find_projection(side)
        if piece is None or not piece.is_packed or not is_only_reader(side, node) or len(piece.node.output.users) > 1:
            continue
        if any(chain.x is piece.x for chain in _find_chains(opposite, node)) and side.producer is not None:
            split_linear(side.producer)
            return _find_matching_chains(node)
    first, second = list(_find_chains(a, node)), list(_find_chains(b, node))
    return next(((p, q) for p in first for q in second if p.x is q.x), None)


def _replace_chain(chain: Chain, base: Node) -> Node:
    """Replace the nodes of `chain` by one linear and return it; its parameters are named after those of `base`."""
    last, graph, weight = chain.nodes[0], base.graph, require_param(base, "weight")
    width = last.output.width
    biases = [v for n in (base, *chain.nodes) if n.op is ops.linear and isinstance(v := n.operand("bias"), Param)]
    merged = derive_param(weight, chain.weight, (width, chain.x.width))
    bias = None if chain.bias is None else derive_param(biases[0], chain.bias, (width,))
    with graph.inserting(before=last):
        y = ops.linear(chain.x, merged, bias)
    replace_uses(last.output, y)
    # `nodes` begin with the last, so each is erased after its reader.
    for node in chain.nodes:
        graph.erase(node)
    replace_param(weight, merged)
    replace_param(biases[0] if biases else None, bias)
    erase_unused_params(graph, [v for node in chain.nodes for v in node.inputs])
    assert y.producer is not None
    return y.producer
