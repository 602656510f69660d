"""Small graphs as ONNX models: lowered without any pass, and run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from weft.backends.onnx.export import BuiltModel, build_model, serialize_model
from weft.backends.target import TARGETS
from weft.ir import Graph, Param, TensorType, Value
from weft.ir.recipes import Source
from weft.ir.recipes.readers import MemoryReader
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType


class Builder:
    """A graph with inputs and weights that are added as arrays; float64 arrays have the type `dtype`."""

    def __init__(self, dtype: DType = dtypes.f32) -> None:
        self.graph, self.dtype = Graph("small", MemoryReader({})), dtype
        self.feeds: dict[str, NDArray[Any]] = {}

    def _type(self, array: NDArray[Any]) -> TensorType:
        return TensorType(self.dtype if array.dtype.kind == "f" else dtypes.i64, array.shape)

    def input(self, name: str, array: NDArray[Any]) -> Value:
        """Add an input that gets `array`."""
        self.feeds[name] = array
        return self.graph.add_input(name, self._type(array))

    def weight(self, name: str, array: NDArray[Any]) -> Param:
        """Add a parameter of `array`."""
        self.graph.reader.arrays[name] = array  # type: ignore[attr-defined]  # a MemoryReader
        return self.graph.add_param(name, self._type(array), Source(name))

    def build(self, target: str = "onnx", **outputs: Value) -> BuiltModel:
        """Lower the graph with these outputs for `target`."""
        for name, value in outputs.items():
            self.graph.add_output(name, value)
        return build_model(self.graph, TARGETS[target], max_length=32)


def op_types(built: BuiltModel) -> list[str]:
    """Return the operators of a model in order."""
    return [node.op_type for node in built.model.graph]


def run(built: BuiltModel, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the outputs of a model by name; floats are cast to the types of its inputs."""
    session = ort.InferenceSession(serialize_model(built), providers=["CPUExecutionProvider"])
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
    given = {i.name: feeds[i.name].astype(kinds[i.type]) for i in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))
