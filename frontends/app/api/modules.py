"""`weft.torch`, `weft.state_dict`, `weft.with_weights`: a source as an `nn.Module` of readable PyTorch, or its weights,
without files; and the weights of a module, trained or not, back in the graph."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.backends.options import no_effect
from weft.backends.runtime.torch.folder import pytorch
from weft.backends.targets import MODEL, TARGETS
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.graph.verifier import verify
from weft.ir.recipes import Recipe, Source
from weft.ir.recipes.blocks import Kept
from weft.ir.recipes.readers import MemoryReader
from weft.passes import Pipeline, default_pipeline, run_passes
from weft.passes.forms import make_forms

from ...model import SourceLike
from .rewriting import pipeline_text
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
    """`source` (whatever `load_source` takes, a module, or a graph) as a PyTorch module with its weights.

    `model(input_ids)` gives what the graph's only output is, [batch, seq, vocab] logits for a language model;
    ``cache = model.new_cache(batch, length)`` and `model(input_ids, cache=cache)` continue texts call by call. The
    module trains, pickles, and shows its source (`inspect.getsource`).

    Args:
        dtype: of the weights: "f32" (where None), "bf16" or "f16", or a dtype of torch.
        device: where they lie; the CPU if None.
        seed: of the random initialization, for sources without a checkpoint; 0 if None.
        passes: pipeline text, or ``@path`` of a file that holds it; the default only simplifies.
        keep_blocks: ``head`` or ``all``: weights of the output head, or of every linear map, stay in the 4- or 8-bit
            blocks of the source, where it has them. Such weights are buffers, which training leaves as they are.

    Raises:
        WeftError: on any bad input, and where PyTorch is not installed.
    """
    kind = _dtype(dtype)
    from weft.backends.torch.package.module import build_module

    forms = _forms(source, seed, passes, keep_blocks)
    return build_module(forms, dtype=kind, device="cpu" if device is None else device)


def state_dict(
    source: SourceLike,
    *,
    dtype: str | Dtype | None = None,
    seed: int | None = None,
    passes: str = "default",
    keep_blocks: str = "",
) -> dict[str, Tensor]:
    """The weights of `source` under the names that the module `torch` makes of it has, on the CPU.

    So a module takes those of another checkpoint of its architecture, whatever that calls them:
    ``module.load_state_dict(weft.state_dict("folder/"))``. Arguments and errors as of `torch`.
    """
    kind = _dtype(dtype)
    from weft.backends.torch.lower.lower import lower
    from weft.backends.torch.package.module import tensor

    graph = _forms(source, seed, passes, keep_blocks)[MODEL]
    return {key: tensor(param, graph.reader, kind) for key, param in lower(graph).program.weights.items()}


def _dtype(dtype: str | Dtype | None) -> Dtype:
    """A dtype of torch."""
    framework = pytorch()
    if dtype is not None and not isinstance(dtype, str):
        if not dtype.is_floating_point:
            raise WeftError(
                f"dtype {dtype} is for whole numbers, which no weights are: torch.float32, torch.bfloat16, …"
            )
        return dtype
    torch_dtype: Dtype = getattr(framework, NAMES[TARGETS["torch"].dtype(dtype)])
    return torch_dtype


def _forms(source: SourceLike, seed: int | None, passes: str, keep_blocks: str) -> dict[str, Graph]:
    """The forms of `source` after the pipeline of the target, with the parameters that `source` declares."""
    from weft.backends.torch.program.quantized import widens_all

    target = TARGETS["torch"]
    options = target.choose({"keep_blocks": keep_blocks})
    model = load_source(source, seed=seed)
    model.notices()  # which refuse a part without which it computes something else
    verify(model.graph, recipes=True)
    passes = ", ".join(filter(None, (pipeline_text(passes), *options.passes().values())))
    graph = run_passes(model.graph, target.pipeline(model.graph, "f32", passes, trains=True))
    if keep_blocks and (reason := widens_all(graph)):
        raise no_effect(f"keep_blocks={keep_blocks!r}", reason)
    return module_forms(graph)


def module_forms(graph: Graph) -> dict[str, Graph]:
    """Return graphs by form: "" is `graph`, "model" its legalized copy, from which target torch writes a module."""
    target = TARGETS["torch"]
    return make_forms(graph, {MODEL: target.forms(graph, target.choose({}))[MODEL]})


def step_forms(graph: Graph) -> dict[str, Graph]:
    """Return graphs by form, as `module_forms` does, with "step" as well: the fused graph of a decode step."""
    target = TARGETS["torch"]
    return make_forms(graph, target.forms(graph, target.choose({})))


def trained(graph: Graph) -> Graph:
    """Return `graph` simplified as far as parameters stay that train."""
    simplify, *_ = default_pipeline(graph, trains=True).phases
    return run_passes(graph, Pipeline((simplify,)))


def with_weights(graph: Graph, state_dict: Mapping[str, Tensor]) -> Graph:
    """`graph` with the tensors of the `state_dict` of its module as weights, in float32 (float64 stays).

    They are copied. Tables that nobody trains stay as they are, and so does what the module leaves out: the noise of
    routers. Sharded tensors are gathered, for which every process must call this.

    Raises:
        WeftError: if a tensor is unknown, missing, or of another shape.
    """
    if any(param.recipe.has(Kept) for param in graph.params.values()):
        raise WeftError("weights that stay in blocks are not trained: give the graph of a module without keep_blocks")
    declared, read = _keys(module_forms(graph)), _keys(module_forms(trained(graph)))
    if unknown := state_dict.keys() - {*declared.values(), *read.values()}:
        name = sorted(unknown)[0]
        raise WeftError(f"the state_dict holds {name}, which graph {graph.name} has not ({len(unknown)} unknown)")
    # Equal parameters are one in the module (pass cse), so of tied names the state_dict has one only.
    ties = {_tie(graph.params[name]): key for name, key in declared.items() if key in state_dict}
    arrays, recipes = {key: _array(tensor) for key, tensor in state_dict.items()}, dict[str, Recipe]()
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
        recipes[name] = Source(key)
    graph = graph.clone(recipes)
    graph.reader = MemoryReader(arrays, "<state_dict>")
    return graph


def _keys(forms: Mapping[str, Graph]) -> dict[str, str]:
    """Return the names of the parameters that a module of `forms` holds, each with its key in the state_dict."""
    from weft.backends.torch.lower.identifiers import parameter_names
    from weft.backends.torch.lower.lower import lower

    own = parameter_names(forms[""])
    return {own[param.name]: key for key, param in lower(forms[MODEL]).program.weights.items()}


def _tie(param: Param) -> Hashable:
    """Return what parameters have in common that a module holds as one: see the pass cse."""
    return param.type, param.recipe


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A copy of a tensor, on the CPU and whole."""
    import torch

    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    # numpy has no bf16; f32 holds every number of the 16-bit types.
    small = whole.is_floating_point() and whole.dtype != torch.float64
    return np.array(whole.detach().to("cpu", torch.float32 if small else None).numpy())
