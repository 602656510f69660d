"""Packages: graphs that are one model together, such as an encoder and its decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weft.ir import Graph, WeftError
from weft.ir.recipes.readers import Array
from weft.ir.types import TensorType


@dataclass(frozen=True)
class Connection:
    """An output of the graph `maker` that the graph `reader` reads, by the `name` that the model has for it."""

    maker: str
    reader: str
    name: str
    type: TensorType


@dataclass(frozen=True)
class Package:
    """Graphs by name, in the order in which they run.

    An input is the output of an earlier graph that is called so, or else one of the model. `renamed` has the names of
    inputs and outputs in the model, by graph, where they are others.
    """

    graphs: Mapping[str, Graph]
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def connections(self) -> list[Connection]:
        """Return what goes from one graph to another.

        Raises:
            WeftError: if a graph reads a value in another type than it is made in, naming both.
        """
        made, found = dict[str, tuple[str, TensorType]](), list[Connection]()
        for reader, graph in self.graphs.items():
            for name, value in graph.inputs.items():
                named = self._in_model(reader, name)
                if named not in made:
                    continue
                maker, type = made[named]
                if value.type != type:
                    raise WeftError(f"{reader} reads {named} as {value.type}, which {maker} makes as {type}")
                found.append(Connection(maker, reader, named, type))
            made |= {self._in_model(reader, name): (reader, v.type) for name, v in graph.outputs.items()}
        return found

    def run(
        self, run: Callable[[Graph, Mapping[str, Array]], Mapping[str, Array]], inputs: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Run every graph by `run`, which takes its inputs, and return `inputs` and all outputs by their names in the
        model."""
        known = dict(inputs)
        for reader, graph in self.graphs.items():
            made = run(graph, {name: known[self._in_model(reader, name)] for name in graph.inputs})
            known |= {self._in_model(reader, name): array for name, array in made.items()}
        return known

    def _in_model(self, graph: str, name: str) -> str:
        return self.renamed.get(graph, {}).get(name, name)
