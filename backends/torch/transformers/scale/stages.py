"""Pipeline stages, and the stage of each layer, weight and node."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir.graph import Node

from ..lower.lower_base_and_head import LoweredModel
from ..modeling.base import BaseModel
from .shards import PREFIX


@dataclass(frozen=True)
class Stages:
    """A model cut into `count` pipeline stages of ⌊layers / count⌋ consecutive layers each; where layers are left over,
    the first stages have one more, as in transformers from 5.24 on."""

    lowered: LoweredModel
    base: BaseModel
    count: int

    def get_layers(self, stage: int) -> range:
        """Return the indices of the layers of `stage`; both are counted from 0."""
        number = len(self.base.stack or ())
        each, rest = divmod(number, self.count)
        start = stage * each + min(stage, rest)
        return range(start, start + each + (stage < rest))

    def find_stage(self, path: str) -> int:
        """Return the stage (from 0) of the module at `path` in the base model: that of its layer, else the first for
        the token embedding and the last for others."""
        layer = self._find_layer(path)
        if layer is not None:
            return next(s for s in range(self.count) if layer in self.get_layers(s))
        embedding = self.lowered.emitter.embedding
        return 0 if embedding and (path == embedding or path.startswith(f"{embedding}.")) else self.count - 1

    def list_stages(self, key: str) -> list[int]:
        """Return the stages that store the weight `key`, ascending. The last stage stores the weights of the head, and
        also a weight of another stage that is tied to the head."""
        path = key.removeprefix(PREFIX) if self.lowered.head is not None else key
        if path == key and self.lowered.head is not None:
            return [self.count - 1]
        last = {self.count - 1} if path in self.lowered.tied_keys.values() else set()
        return sorted({self.find_stage(path)} | last)

    def map_nodes(self) -> dict[Node, int]:
        """Map each node of the graph to its stage: that of its layer, the last for the head, and for other nodes that
        of the layer before them (the first stage before all layers)."""
        stages, current, head = {}, 0, self.lowered.head
        for node in self.lowered.graph.nodes:
            layer = self._find_layer(node.scope)
            current = current if layer is None else self.find_stage(node.scope)
            in_head = layer is None and head is not None and node in head.nodes
            stages[node] = self.count - 1 if in_head else current
        return stages

    def _find_layer(self, path: str) -> int | None:
        stack = self.base.stack
        if stack is None or not path.startswith(f"{stack.path}."):
            return None
        return int(path.removeprefix(f"{stack.path}.").partition(".")[0])
