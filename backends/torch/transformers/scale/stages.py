"""Stages of a pipeline, with their layers, weights and nodes."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir.graph import Node

from ..lower.lower_base_and_head import LoweredModel
from ..modeling.base import BaseModel
from .shards import PREFIX


@dataclass(frozen=True)
class Stages:
    """`count` pipeline stages with equal numbers of layers; the first stages have one more if some remain, as
    transformers divides them from 5.24 on."""

    lowered: LoweredModel
    base: BaseModel
    count: int

    def get_layers(self, stage: int) -> range:
        """Return the indices of the layers of stage number `stage`, from 0."""
        number = len(self.base.stack or ())
        each, rest = divmod(number, self.count)
        start = stage * each + min(stage, rest)
        return range(start, start + each + (stage < rest))

    def find_stage(self, path: str) -> int:
        """Return the stage of the module at `path` in the base model: the first for the embedding, the last for other
        modules outside of the layers."""
        layer = self._find_layer(path)
        if layer is not None:
            return next(s for s in range(self.count) if layer in self.get_layers(s))
        embedding = self.lowered.emitter.embedding
        return 0 if embedding and (path == embedding or path.startswith(f"{embedding}.")) else self.count - 1

    def list_stages(self, key: str) -> list[int]:
        """Return the stages that store the tensor `key`; an embedding table tied to the head is on the first and the
        last."""
        path = key.removeprefix(PREFIX) if self.lowered.head is not None else key
        if path == key and self.lowered.head is not None:
            return [self.count - 1]
        stages = {self.find_stage(path)}
        return sorted(stages | ({self.count - 1} if path in self.lowered.tied.values() else set()))

    def map_nodes(self) -> dict[Node, int]:
        """Return the stage of each node; a node between layers belongs to the first stage, a node of the head to the
        last."""
        stages, current = {}, 0
        for node in self.lowered.graph.nodes:
            layer = self._find_layer(node.scope)
            current = current if layer is None else self.find_stage(node.scope)
            stages[node] = self.count - 1 if layer is None and self._is_head(node) else current
        return stages

    def _is_head(self, node: Node) -> bool:
        return self.lowered.head is not None and node in self.lowered.head.nodes

    def _find_layer(self, path: str) -> int | None:
        stack = self.base.stack
        if stack is None or not path.startswith(f"{stack.path}."):
            return None
        return int(path.removeprefix(f"{stack.path}.").partition(".")[0])
