"""Extend attention biases to cached keys: key positions are counted along the mask, not only the new tokens.

A bias from an op with its own cache already covers all slots of that cache.
"""

from __future__ import annotations

from weft.ir import Graph, Node, Value, WeftError, ops
from weft.ir.types import sizes

from ...analysis.states import caches
from ...edits.edit import backward_slice


class KeyAxis:
    """An extension of attention biases to all keys that `mask` [batch, total] covers, past and new.

    `positions` are those of the new tokens, `makers` the nodes that compute biases. An iota over tokens, and an operand
    `keys` of a position bias that is `positions`, are replaced by a count along the mask.
    """

    def __init__(self, graph: Graph, mask: Value, positions: Value, makers: list[Node]) -> None:
        self.graph = graph
        self.mask = mask
        self.positions = positions
        self.makers = makers
        self.extended: dict[Value, Value] = {}

    def extend(self, bias: Value | None) -> Value | None:
        """Return `bias` [batch, heads, queries, keys] extended to [batch, heads, queries, total].

        A bias whose producer has a cache is returned unchanged.

            Raises:
                WeftError: if it cannot be extended.
        """
        if bias is None or (bias.producer is not None and caches(bias.producer)):
            return bias
        counted = [n.output for n in self.makers if n.op is ops.iota]
        needed = {*backward_slice([bias], counted), *(v.producer for v in counted)}
        for node in self.makers:
            if node in needed and node.output not in self.extended:
                try:
                    self._reemit(node)
                except WeftError as e:
                    raise WeftError(f"kv-cache: bias %{bias.name} does not extend to cached keys: {e}") from None
        new = self.extended.get(bias, bias)
        queries, keys = new.shape[2:]
        if (keys != sizes.sym("total") and keys != 1) or "total" in sizes.names(queries):
            raise WeftError(
                f"kv-cache: bias %{bias.name} does not extend to cached keys; count keys by an iota over the tokens "
                "and queries by the input position_ids"
            )
        return new

    def _reemit(self, node: Node) -> None:
        """Emit a copy of `node` on extended operands and store its outputs in `extended`; do nothing without any."""
        operands = [None if v is None else self.extended.get(v, v) for v in node.inputs]
        with self.graph.inserting(before=node):
            if node.op is ops.iota and sizes.names(node.output.shape[0]):
                # The mask covers past and new tokens, the input of tokens only the new ones.
                outs = ops.iota.emit(self.mask, axis=1)
            else:
                for i, (operand, v) in enumerate(zip(node.op.operands, operands, strict=False)):
                    if operand.name == "keys" and v is self.positions:
                        operands[i] = ops.unsqueeze(ops.iota(self.mask, axis=1), axes=(0,), name="key_positions")
                if operands == list(node.inputs):
                    return
                outs = node.op.emit(*operands, **node.attrs)
        for old, new in zip(node.outputs, outs, strict=True):
            self.extended[old] = new
            old.name, new.name = new.name, old.name

    def drop_unused(self) -> None:
        """Erase those of `makers` that have no readers left, because extended copies replaced them."""
        # Readers first: a node can be erased only after all of its readers.
        for node in reversed(self.makers):
            if not any(v.uses or v.is_output for v in node.outputs):
                self.graph.erase(node)
