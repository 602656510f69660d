"""Generated modules of the zoo beside the interpreter: inputs, outputs, tolerances; made once per session."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weft.backends.runtime.torch.open_torch import import_from
from weft.backends.torch.codegen.model_source import write_source
from weft.backends.torch.lower.identifiers import map_parameter_names
from weft.ir import Graph, interpret
from weft.ir.recipes import Source
from weft.ir.recipes.readers import MemoryReader
from weft.passes.core.equivalence import EquivalenceCheck

from ...lowered import build_module, lower
from ...passes.zoo import ZOO

Arrays = dict[str, NDArray[Any]]
CHOOSES = {"route", "expert_choice", "limit_capacity", "top_k"}  # near ties of narrow dtypes fall to another side
COMPETES = {"expert_choice", "limit_capacity"}  # tokens of one call with each other: calls do not add up
SEQ = 6


@functools.cache
def graph_of(name: str) -> Graph:
    return ZOO[name]()


@functools.cache
def module_of(name: str) -> nn.Module:
    return build_module(graph_of(name)).eval()


@functools.cache
def feeds_of(name: str) -> Arrays:
    return EquivalenceCheck(0).make_inputs(graph_of(name), seq=SEQ)


@functools.cache
def wanted(name: str) -> Arrays:
    return interpret(graph_of(name), feeds_of(name))


def rounded(graph: Graph, module: nn.Module) -> Graph:
    """`graph` with the weights that `module` has, rounded as they are there."""
    copy, weights = graph.clone(), module.state_dict()
    reader = MemoryReader({})
    for key, name in map_parameter_names(graph).items():
        if key in weights:
            param, tensor = copy.params[name], weights[key]
            reader.arrays[key] = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
            param.recipe = Source(key)
    copy.reader = reader
    return copy


def tensors(feeds: Mapping[str, NDArray[Any]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Inputs as the arguments of a generated forward."""
    found = {name.replace(".", "_"): torch.from_numpy(np.array(a)) for name, a in feeds.items()}
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in found.items()}


def accepts(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(module.forward).parameters


def call(module: nn.Module, given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """All outputs; inputs that the model does not read are left out."""
    with torch.no_grad():
        made = module(**{k: v for k, v in given.items() if accepts(module, k)})
    return made if isinstance(made, tuple) else (made,)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Import what stands in `folder`, in this process, while weft cannot be imported."""
    with import_from(folder), pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "weft"]:
            patch.setitem(sys.modules, name, None)
        yield


def depth(graph: Graph) -> int:
    """Return the length of the longest path, in nodes."""
    flow: nx.DiGraph = nx.DiGraph()
    for node in graph.nodes:
        flow.add_edges_from((v.producer, node) for v in node.inputs if v is not None and v.producer is not None)
    return int(nx.dag_longest_path_length(flow)) + 1


def widest(graph: Graph) -> int:
    """The longest sum that a fixed axis makes."""
    return max([s for v in graph.params.values() for s in v.shape if isinstance(s, int)], default=1)


def tolerance(graph: Graph, dtype: torch.dtype) -> float:
    """Of the largest number of an output: rounding errors of all steps on the longest path, added like random ones;
    float32 also sums in its own precision, narrower dtypes in float32."""
    eps = torch.finfo(dtype).eps
    terms = widest(graph) if dtype == torch.float32 else 1
    return float(8 * eps * (depth(graph) * terms) ** 0.5)


def errors(got: Tensor, want: NDArray[Any]) -> NDArray[np.float64]:
    """Absolute differences over the largest number."""
    assert tuple(got.shape) == want.shape
    scale = max(float(np.abs(want).max(initial=0)), 1e-30)
    return np.abs(got.double().numpy() - want.astype(np.float64)) / scale


def assert_close(got: Tensor, want: NDArray[Any], bound: float) -> None:
    error = float(errors(got, want).max(initial=0))
    assert error <= bound, f"{error:.2e} is more than {bound:.2e}"


def class_docs(graph: Graph) -> dict[str, str]:
    """Map the names of the generated classes of `graph` to their docstrings, in the order of the source."""
    tree = ast.parse(write_source(lower(graph)).text)
    found = [n for n in tree.body if isinstance(n, ast.ClassDef) and "nn.Module" in map(ast.unparse, n.bases)]
    return {n.name: ast.get_docstring(n) or "" for n in found}
