"""Extend attention biases to cached keys: key positions are counted along the mask, not only the new tokens.

A bias from an op with its own cache already covers all slots of that cache.
"""

from __future__ import annotations

from weft.ir import Graph, Node, Value, WeftError, ops
from weft.ir.types import sizes

from ...analysis.states import find_caches
from ...edits.edit import backward_slice


class BiasExtension:
    """A rewrite of attention biases over the new keys [.., seq] into biases over past and new keys [.., total].
    `positions` [batch, seq] are those of the new tokens; `bias_nodes` compute the biases. An iota over tokens, and
    `positions` as the operand `keys` of a bias op, are replaced by an iota along axis 1 of `mask` [batch, total]."""

    def __init__(self, graph: Graph, mask: Value, positions: Value, bias_nodes: list[Node]) -> None:
        self.graph = graph
        self.mask = mask
        self.positions = positions
        self.bias_nodes = bias_nodes
        self.extended: dict[Value, Value] = {}

    def extend(self, bias: Value | None) -> Value | None:
        """Return `bias` [batch, heads, queries, keys] extended to [batch, heads, queries, total].

        None, and the output of an op that has its own cache, are returned unchanged.

        Raises:
            WeftError: if the keys are not counted by an iota over the tokens, or the queries not by position_ids.
        """
        if bias is None or (bias.producer is not None and find_caches(bias.producer)):
            return bias
        counts = [n.output for n in self.bias_nodes if n.op is ops.iota]
        dependencies = {*backward_slice([bias], counts), *(v.producer for v in counts)}
        for node in self.bias_nodes:
            if node in dependencies and node.output not in self.extended:
                try:
                    self._reemit_node(node)
                except WeftError as e:
                    raise WeftError(f"kv-cache: bias %{bias.name} does not extend to cached keys: {e}") from None
        new = self.extended.get(bias, bias)
        queries, keys = new.shape[2:]
        if (keys != sizes.sym("total") and keys != 1) or "total" in sizes.list_names(queries):
            raise WeftError(
                f"kv-cache: bias %{new.name} does not extend to cached keys: compute it from an iota over tokens for "
                "keys, and from the input position_ids for queries"
            )
        return new

    def _reemit_node(self, node: Node) -> None:
        """Emit `node` again over all keys and store the outputs in `extended`; do nothing if no operand changes."""
        operands = [None if v is None else self.extended.get(v, v) for v in node.inputs]
        with self.graph.inserting(before=node):
            if node.op is ops.iota and sizes.list_names(node.output.shape[0]):
                # The mask covers past and new tokens, the input of tokens only the new ones.
                outputs = ops.iota.emit(self.mask, axis=1)
            else:
                for i, (operand, v) in enumerate(zip(node.op.operands, operands, strict=False)):
                    if operand.name == "keys" and v is self.positions:
                        operands[i] = ops.unsqueeze(ops.iota(self.mask, axis=1), axes=(0,), name="key_positions")
                if operands == list(node.inputs):
                    return
                outputs = node.op.emit(*operands, **node.attrs)
        for old, new in zip(node.outputs, outputs, strict=True):
            self.extended[old] = new
            old.name, new.name = new.name, old.name

    def drop_unused(self) -> None:
        """Erase the nodes in `bias_nodes` that have no readers left because extended copies replaced them."""
        # Readers first: a node can be erased only after all of its readers.
        for node in reversed(self.bias_nodes):
            if not any(v.uses or v.is_output for v in node.outputs):
                self.graph.erase(node)
