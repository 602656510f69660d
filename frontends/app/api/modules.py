"""`weft.torch`, `weft.state_dict`, `weft.with_weights`: a source as an `nn.Module` without files, and its weights."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.backends.options import make_no_effect_error
from weft.backends.target import MODEL, TARGETS, import_torch
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.graph.verifier import verify
from weft.ir.recipes import Recipe, Source
from weft.ir.recipes.blocks import Kept
from weft.ir.recipes.readers import MemoryReader
from weft.passes import Pipeline, default_pipeline, run_passes
from weft.passes.forms import derive_graphs

from ...model import SourceLike
from .rewrite import resolve_pipeline
from .source.sources import load_source

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch import device as Device
    from torch import dtype as Dtype

NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}  # as torch calls them


def torch(
    source: SourceLike,
    *,
    dtype: str | Dtype | None = None,
    device: str | Device | None = None,
    seed: int | None = None,
    passes: str = "default",
    keep_blocks: str = "",
) -> nn.Module:
    """Return `source` (anything that `load_source` accepts, a module, or a graph) as a PyTorch module with its weights.

    `model(input_ids)` returns the graph's only output, [batch, seq, vocab] logits for a language model. ``cache =
    model.new_cache(batch, length)`` and `model(input_ids, cache=cache)` decode incrementally. The module
    trains, pickles, and shows its source (`inspect.getsource`).

    Args:
        dtype: of the weights: "f32" (if None), "bf16" or "f16", or a dtype of torch.
        device: of the weights; the CPU if None.
        seed: of the random initialization, for sources without a checkpoint; 0 if None.
        passes: pipeline as a string, or ``@path`` of a file with one; ``default`` only simplifies the graph.
        keep_blocks: ``head`` or ``all``: weights of the output head, or of all linear layers, stay in the source's
            4- or 8-bit blocks. Such weights are buffers, which training does not change.

    Raises:
        WeftError: on any bad input, and if PyTorch is not installed.
    """
    kind = _resolve_dtype(dtype)
    from weft.backends.torch.package.module import build_module

    forms = _build_graphs(source, seed, passes, keep_blocks)
    return build_module(forms, dtype=kind, device="cpu" if device is None else device)


def state_dict(
    source: SourceLike,
    *,
    dtype: str | Dtype | None = None,
    seed: int | None = None,
    passes: str = "default",
    keep_blocks: str = "",
) -> dict[str, Tensor]:
    """Return the weights of `source` on the CPU, keyed by their names in the module that `torch` builds from it.

    Thus a module can load any checkpoint of its architecture, even if that names its tensors otherwise:
    ``module.load_state_dict(weft.state_dict("folder/"))``. Arguments and errors as in `torch`.
    """
    kind = _resolve_dtype(dtype)
    from weft.backends.torch.lower.lower import lower
    from weft.backends.torch.package.module import evaluate_param

    graph = _build_graphs(source, seed, passes, keep_blocks)[MODEL]
    return {key: evaluate_param(param, graph.reader, kind) for key, param in lower(graph).program.weights.items()}


def _resolve_dtype(dtype: str | Dtype | None) -> Dtype:
    """Return a dtype of torch for its name, f32 if None; raise WeftError for integer dtypes."""
    framework = import_torch()
    if dtype is not None and not isinstance(dtype, str):
        if not dtype.is_floating_point:
            raise WeftError(f"dtype {dtype} is not a float dtype: use torch.float32, torch.bfloat16 or torch.float16")
        return dtype
    torch_dtype: Dtype = getattr(framework, NAMES[TARGETS["torch"].dtype(dtype)])
    return torch_dtype


def _build_graphs(source: SourceLike, seed: int | None, passes: str, keep_blocks: str) -> dict[str, Graph]:
    """Return the graphs from which target torch builds a module, keyed by form, with parameter names of `source`."""
    from weft.backends.torch.program.block_params import explain_no_blocks

    target = TARGETS["torch"]
    options = target.choose({"keep_blocks": keep_blocks})
    model = load_source(source, seed=seed)
    model.notices()  # raises an error for missing parts that change the outputs
    verify(model.graph, recipes=True)
    passes = ", ".join(filter(None, (resolve_pipeline(passes), *options.passes().values())))
    graph = run_passes(model.graph, target.pipeline(model.graph, "f32", passes, trains=True))
    if keep_blocks and (reason := explain_no_blocks(graph)):
        raise make_no_effect_error(f"keep_blocks={keep_blocks!r}", reason)
    return build_module_graphs(graph)


def build_module_graphs(graph: Graph) -> dict[str, Graph]:
    """Return graphs keyed by form: "" is `graph`, "model" its legalized copy, which target torch writes as a module."""
    target = TARGETS["torch"]
    return derive_graphs(graph, {MODEL: target.forms(graph, target.choose({}))[MODEL]})


def build_step_graphs(graph: Graph) -> dict[str, Graph]:
    """Return the graphs of `build_module_graphs`, and if target torch can write a decode step, its graph as "step"."""
    target = TARGETS["torch"]
    return derive_graphs(graph, target.forms(graph, target.choose({})))


def simplify_trainable(graph: Graph) -> Graph:
    """Return `graph` after the first phase of the pipeline for training, which keeps dropout and folds no weights."""
    simplify, *_ = default_pipeline(graph, trains=True).phases
    return run_passes(graph, Pipeline((simplify,)))


def with_weights(graph: Graph, state_dict: Mapping[str, Tensor]) -> Graph:
    """Return a copy of `graph` with the tensors of its module's `state_dict` as weights, in float32 (float64 stays).

    The tensors are copied. Tables that are not trained keep their values, as do parameters that the module leaves out:
    the noise of routers. Sharded tensors are gathered, so every process must call this.

    Raises:
        WeftError: if a tensor is unknown, missing, or of another shape, or `graph` has weights in quantized blocks.
    """
    if any(param.recipe.has(Kept) for param in graph.params.values()):
        raise WeftError(f"graph {graph.name} has quantized blocks, which do not train: build it without keep_blocks")
    declared, read = map_state_keys(graph), map_state_keys(simplify_trainable(graph))
    if unknown := state_dict.keys() - {*declared.values(), *read.values()}:
        name = sorted(unknown)[0]
        raise WeftError(f"the state_dict has {name}, but graph {graph.name} does not ({len(unknown)} unknown in total)")
    # Equal parameters are one in the module (pass cse), so the state_dict has only one of several tied names.
    ties = {_tie_key(graph.params[name]): key for name, key in declared.items() if key in state_dict}
    arrays, recipes = {key: _to_array(tensor) for key, tensor in state_dict.items()}, dict[str, Recipe]()
    for name, declared_key in declared.items():
        param = graph.params[name]
        if param.recipe.is_constant:
            continue
        keys = [read[name], declared_key] if name in read else [declared_key, ties.get(_tie_key(param), declared_key)]
        key = next((key for key in keys if key in arrays), declared_key)
        if key not in arrays and name in read:
            raise WeftError(f"the state_dict has no {key}, a parameter of graph {graph.name}")
        if key not in arrays:
            arrays[key] = param.recipe.evaluate(graph.reader)
        if (shape := arrays[key].shape) != (expected := tuple(param.type.concrete({}))):
            raise WeftError(f"{key} is {list(shape)} in the state_dict, but {list(expected)} in graph {graph.name}")
        recipes[name] = Source(key)
    graph = graph.clone(recipes)
    graph.reader = MemoryReader(arrays, "<state_dict>")
    return graph


def map_state_keys(graph: Graph) -> dict[str, str]:
    """Return the state_dict key of each parameter of the module that is built from `graph`, keyed by parameter name."""
    from weft.backends.torch.lower.identifiers import map_parameter_names
    from weft.backends.torch.lower.lower import lower

    forms = build_module_graphs(graph)
    names = map_parameter_names(forms[""])
    return {names[param.name]: key for key, param in lower(forms[MODEL]).program.weights.items()}


def _tie_key(param: Param) -> Hashable:
    """Return a key that is equal for parameters that the pass cse merges (tied weights)."""
    return param.type, param.recipe


def _to_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as a numpy array: a copy on the CPU, gathered from all devices."""
    import torch

    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    # numpy has no bf16; f32 represents every value of the 16-bit types.
    small = gathered.is_floating_point() and gathered.dtype != torch.float64
    return np.array(gathered.detach().to("cpu", torch.float32 if small else None).numpy())
