"""Pipeline stages, and the stage of each layer, weight and node."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir.graph import Node

from ..lower.lower_base_and_head import LoweredModel
from ..modeling.base import BaseModel
from .shards import PREFIX


@dataclass(frozen=True)
class Stages:
    """A model cut into `count` pipeline stages of consecutive layers: ⌊layers / count⌋ each, and one more in each of
    the first layers mod `count` stages, as in transformers from 5.24 on."""

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
        """Return the stage (from 0) of the module at `path` in the base model: the stage of its layer; outside of
        layers, the first stage for the token embedding, else the last."""
        layer = self._find_layer(path)
        if layer is not None:
            return next(s for s in range(self.count) if layer in self.get_layers(s))
        embedding = self.lowered.emitter.embedding
        return 0 if embedding and (path == embedding or path.startswith(f"{embedding}.")) else self.count - 1

    def list_stages(self, key: str) -> list[int]:
        """Return the stages that store the weight `key`, ascending: the stage of its module, the last for a weight of
        the head. If it is tied to the head, the last stage also stores it."""
        path = key.removeprefix(PREFIX) if self.lowered.head is not None else key
        if path == key and self.lowered.head is not None:
            return [self.count - 1]
        last = {self.count - 1} if path in self.lowered.tied_keys.values() else set()
        return sorted({self.find_stage(path)} | last)

    def map_nodes(self) -> dict[Node, int]:
        """Map each node of the graph to a stage: a node of a layer to the layer's, a node of the head to the last, any
        other node to the stage of the last layer before it, or the first stage if there is none."""
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
