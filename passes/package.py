"""Packages: graphs that form one model together, such as an encoder and its decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weft.ir import Graph, WeftError
from weft.ir.recipes.readers import Array
from weft.ir.types import TensorType


@dataclass(frozen=True)
class GraphConnection:
    """An output of the graph named `maker` that is an input of the graph `reader`; `name` is its name in the model."""

    maker: str
    reader: str
    name: str
    type: TensorType


@dataclass(frozen=True)
class Package:
    """Graphs by name, in the order in which they run.

    A graph's input is the output of an earlier graph with the same name in the model, else an input of the model.
    For each graph, `renamed` maps names of inputs and outputs to names in the model; unlisted names stay.
    """

    graphs: Mapping[str, Graph]
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def find_connections(self) -> list[GraphConnection]:
        """Return the connections between the graphs, in the order of the reading graphs and of their inputs.

        Raises:
            WeftError: if a connected output and input differ in type, naming both graphs.
        """
        outputs, connections = dict[str, tuple[str, TensorType]](), list[GraphConnection]()
        for reader, graph in self.graphs.items():
            for name, value in graph.inputs.items():
                model_name = self._in_model(reader, name)
                if model_name not in outputs:
                    continue
                maker, type = outputs[model_name]
                if value.type != type:
                    raise WeftError(f"{reader} reads {model_name} as {value.type}, but {maker} returns {type}")
                connections.append(GraphConnection(maker, reader, model_name, type))
            outputs |= {self._in_model(reader, name): (reader, v.type) for name, v in graph.outputs.items()}
        return connections

    def run(
        self, run: Callable[[Graph, Mapping[str, Array]], Mapping[str, Array]], inputs: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Call run(graph, its inputs) for every graph; return `inputs` and all outputs, by their names in the model."""
        values = dict(inputs)
        for reader, graph in self.graphs.items():
            outputs = run(graph, {name: values[self._in_model(reader, name)] for name in graph.inputs})
            values |= {self._in_model(reader, name): array for name, array in outputs.items()}
        return values

    def _in_model(self, graph: str, name: str) -> str:
        return self.renamed.get(graph, {}).get(name, name)
