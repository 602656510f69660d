"""Merge PEFT adapters into the graph of a model folder, whose weights have the names of transformers' modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.recipes import Source

from ..hf.adapter import Adapter, read_adapter
from ..hf.merging import Merger, merge

_HEAD, _BASE = "lm_head.weight", "model."  # the names that target transformers writes


def merge_adapters(graph: Graph, source: str, folders: Sequence[Path]) -> list[Adapter]:
    """Merge the adapters in `folders`, in order, into the recipes of `graph` in place; return the adapters.

    `graph`, which errors call `source`, must read tensors by the names that PEFT gives them. A head that is tied to the
    embedding becomes a separate weight if an adapter changes one of the two.

    Raises:
        WeftError: naming the adapter, and the key or tensor that is invalid or does not fit the model.
    """
    adapters = [read_adapter(folder, number) for number, folder in enumerate(folders)]
    table = _find_embedding(graph)
    tied = table is not None and any(node.op is not ops.embedding for node in table.users)
    merge(_GraphMerger(graph, graph.reader, source, tied), adapters)
    return adapters


class _GraphMerger(Merger):
    """A merger for a graph whose checkpoint keys are the names of transformers' modules."""

    @property
    def embedding(self) -> Param | None:
        return _find_embedding(self.graph)

    def is_head(self, name: str) -> bool:
        return name == _HEAD

    def untie(self) -> _GraphMerger:
        embed, key = self.embedding, self.embed
        assert embed is not None
        heads = [(node, i) for node, i in embed.uses if node.op is not ops.embedding]
        if any(node.op is not ops.linear for node, _ in heads):
            raise WeftError(f"{self.source}: an adapter changes the embedding, which other ops than the head read too")
        head = self.graph.add_param(_HEAD, embed.type, Source(_HEAD))
        for node, i in heads:
            node.set_input(i, head)
        merger = _GraphMerger(self.graph, self.base, self.source, False, _HEAD)
        merger.weights[_HEAD] = Source(key)
        return merger

    def list_spellings(self, name: str) -> Iterator[str]:
        yield from (name, _BASE + name, name.removeprefix(_BASE))


def _find_embedding(graph: Graph) -> Param | None:
    tokens = graph.inputs.get("input_ids")
    for node in tokens.users if tokens is not None else ():
        if node.op is ops.embedding and isinstance(table := node.required_operand("table"), Param):
            return table
    return None
