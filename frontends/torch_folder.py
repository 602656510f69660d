"""What a graph becomes for the target torch: a readable model, its weights, and scripts that need nothing of weft."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from weft.backends.torch import export
from weft.ir import dtypes
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.streams import stream
from weft.passes.memory import remembers

from .hf.writing import Tensor, write_shards


class TorchFolder:
    """The model of `graph` with weights in `dtype`, not written yet; `notes` are added to.

    Raises:
        WeftError: if the graph has caches of its own, or an op cannot be written.
    """

    def __init__(self, graph: Graph, dtype: str, notes: list[str]) -> None:
        if remembers(graph):
            raise WeftError("target torch keeps caches by itself: leave out the pass kv-cache, and what needs it")
        self._kind = graph.meta.get("kind", "decoder")
        if self._kind != "encoder":
            _leave_out_losses(graph, notes)
        self._source = export.build(graph)
        self._weights = {
            key: Tensor(w.shape, w.dtype, partial(stream, w.recipe, graph.archive))
            for key, w in export.weights(self._source, dtypes.parse(dtype)).items()
        }
        self.trace: list[str] = []
        self.weight_bytes = sum(w.nbytes for w in self._weights.values())
        self.facts: dict[str, Any] = {"outputs": list(graph.outputs)}

    def write(self, folder: Path, step: Callable[[int], None]) -> None:
        """Write everything into `folder`; `step` is told the bytes just written."""
        export.write_scripts(self._source, self._kind, folder)
        write_shards(folder, self._weights, step=step)


def _leave_out_losses(graph: Graph, notes: list[str]) -> None:
    """Drop the outputs of a language model that are not its logits, so that it returns one tensor."""
    for name in [n for n in graph.outputs if n != "logits"]:
        del graph.outputs[name]
        notes.append(f"the output {name} is left out: `weft.torch` gives a module that returns it")
