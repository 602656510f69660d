"""Weights from PyTorch back into the graph that they belong to: what was trained can be rewritten and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from weft.ir.archive import MemoryArchive
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes import Source

from .identifiers import parameter_names
from .lowering import lower


def with_weights(graph: Graph, state_dict: Mapping[str, torch.Tensor]) -> Graph:
    """`graph` with the tensors of the `state_dict` of its module as weights, in float32 (float64 stays).

    They are copied. What no module holds, since a formula makes it (rotary frequencies), stays as it is. Sharded
    tensors are gathered, for which every process must call this.

    Raises:
        WeftError: if a tensor is unknown, missing, or of another shape.
    """
    if graph.meta.get("keep_blocks"):
        raise WeftError("weights that stay in blocks are not trained: give the graph of a module without keep_blocks")
    own = parameter_names(graph)
    held = {key: own[param.name] for key, param in lower(graph).weights.items()}
    if unknown := state_dict.keys() - held.keys():
        name = sorted(unknown)[0]
        raise WeftError(f"the state_dict holds {name}, which graph {graph.name} has not ({len(unknown)} unknown)")
    graph = graph.clone()
    for key, name in held.items():
        param = graph.params[name]
        if key not in state_dict:
            raise WeftError(f"the state_dict has no {key}, a parameter of graph {graph.name}")
        if (shape := tuple(state_dict[key].shape)) != (wanted := tuple(param.type.concrete({}))):
            raise WeftError(f"{key} is {list(shape)} in the state_dict, but {list(wanted)} in graph {graph.name}")
        param.recipe = Source(key)
    graph.archive = MemoryArchive({name: _array(tensor) for name, tensor in state_dict.items()}, "<state_dict>")
    return graph


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A copy of a tensor, on the CPU and whole."""
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    small = whole.is_floating_point() and whole.dtype != torch.float64
    return np.array(whole.detach().to("cpu", torch.float32 if small else None).numpy())
