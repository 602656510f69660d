"""Weights from PyTorch back into the graph that they belong to: what was trained can be rewritten and compiled."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.recipes import Source
from weft.ir.recipes.readers import MemoryReader
from weft.passes import Pipeline, default_pipeline, run_passes

from ...options import KEEP_BLOCKS

if TYPE_CHECKING:
    import torch


def with_weights(graph: Graph, state_dict: Mapping[str, torch.Tensor]) -> Graph:
    """`graph` with the tensors of the `state_dict` of its module as weights, in float32 (float64 stays).

    They are copied. Tables that nobody trains stay as they are, and so does what the module leaves out: the noise of
    routers. Sharded tensors are gathered, for which every process must call this.

    Raises:
        WeftError: if a tensor is unknown, missing, or of another shape.
    """
    if graph.meta.get(KEEP_BLOCKS):
        raise WeftError("weights that stay in blocks are not trained: give the graph of a module without keep_blocks")
    simplify, *_ = default_pipeline(graph, trains=True).phases
    declared, read = _keys(graph), _keys(run_passes(graph, Pipeline((simplify,))))
    if unknown := state_dict.keys() - {*declared.values(), *read.values()}:
        name = sorted(unknown)[0]
        raise WeftError(f"the state_dict holds {name}, which graph {graph.name} has not ({len(unknown)} unknown)")
    # Equal parameters are one in the module (pass cse), so of tied names the state_dict has one only.
    ties = {_tie(graph.params[name]): key for name, key in declared.items() if key in state_dict}
    arrays, graph = {key: _array(tensor) for key, tensor in state_dict.items()}, graph.clone()
    for name, own in declared.items():
        param = graph.params[name]
        if param.recipe.constant:
            continue
        keys = [read[name], own] if name in read else [own, ties.get(_tie(param), own)]
        key = next((key for key in keys if key in arrays), own)
        if key not in arrays and name in read:
            raise WeftError(f"the state_dict has no {key}, a parameter of graph {graph.name}")
        if key not in arrays:
            arrays[key] = param.recipe.evaluate(graph.reader)
        if (shape := arrays[key].shape) != (expected := tuple(param.type.concrete({}))):
            raise WeftError(f"{key} is {list(shape)} in the state_dict, but {list(expected)} in graph {graph.name}")
        param.recipe = Source(key)
    graph.reader = MemoryReader(arrays, "<state_dict>")
    return graph


def _keys(graph: Graph) -> dict[str, str]:
    """Return the names of the parameters that a module of `graph` holds, each with its key in the state_dict."""
    from ..lower.identifiers import parameter_names
    from ..lower.lower import lower

    own = parameter_names(graph)
    return {own[param.name]: key for key, param in lower(graph).program.weights.items()}


def _tie(param: Param) -> Hashable:
    """Return what parameters have in common that a module holds as one: see the pass cse."""
    return param.type, param.recipe


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A copy of a tensor, on the CPU and whole."""
    import torch

    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    # numpy has no bf16; f32 holds every number of the 16-bit types.
    small = whole.is_floating_point() and whole.dtype != torch.float64
    return np.array(whole.detach().to("cpu", torch.float32 if small else None).numpy())
