"""Build a graph as an `nn.Module` in this process: the generated source runs as a Python module, without files."""

from __future__ import annotations

import copyreg
import hashlib
import linecache
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.recipes.readers import TensorReader
from weft.ir.recipes.streams import cast_finite, stream_rows
from weft.ir.types import dtypes

from ...target import MODEL
from .. import kernels
from ..codegen.model_source import GeneratedSource, write_source
from ..decode.lower_step import explain_refusal
from ..decode.step_source import write_step
from ..lower.lower import lower
from ..program.statements import TORCH_NAMES, get_stored_dtype
from .shipped.load import Failure, check_device
from .source_folder import lower_step_of


def build_module(
    forms: Mapping[str, Graph],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    float8_caches: bool = False,
) -> nn.Module:
    """Return an `nn.Module`, with its weights, that computes ``forms["model"]``; `forms` is from `TorchBackend.forms`.

    The weights are evaluated from their recipes one by one and are in `dtype` on `device`. With `float8_caches` KV
    caches are in FP8. The module's class is `Model` of a generated Python module; `inspect.getsource` and tracebacks
    show its source, and it can be pickled.

    Raises:
        WeftError: if a weight cannot be read, or the device does not exist.
    """
    place = parse_device(device)
    source = write_source(lower(forms[MODEL], float8_caches), kernels.__name__)
    # On meta tensors: no memory for weights that `assign_weights` replaces.
    with torch.device("meta"):
        module: nn.Module = run_source(source.text).Model()
    assign_weights(module, evaluate_weights(source, forms[MODEL].reader, dtype, place))
    return module


def build_step(
    forms: Mapping[str, Graph], module: nn.Module, float8_caches: bool = False
) -> Callable[..., torch.Tensor]:
    """Return the decode step of `forms` on the weights of `module`, built by `build_module` with the same arguments.

    ``step(input_ids [batch, 1], position_ids [batch, 1], cache)`` returns logits [batch, 1, vocab]. The weights that it
    packs become views of one tensor, also in `module`.

    Raises:
        WeftError: if the model has no decode step, or no kernel computes a part of it.
    """
    lowered = lower(forms[MODEL], float8_caches)
    step = lower_step_of(forms, lowered)
    text, _ = write_step(lowered, step, type(module).__module__, kernels.__name__)
    if not text:
        reason = "no kernel computes a part of it" if step is not None else explain_refusal(forms[MODEL])
        raise WeftError(f"no decode step: {reason}")
    run: Callable[..., torch.Tensor] = run_source(text).Step(module)
    return run


def evaluate_weights(
    source: GeneratedSource, reader: TensorReader, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Return the weights of `source` by state_dict key, on `device`; `evaluate_param` describes their dtypes."""
    return {key: evaluate_param(param, reader, dtype).to(device) for key, param in source.weights.items()}


def evaluate_param(param: Param, reader: TensorReader, dtype: torch.dtype) -> torch.Tensor:
    """Return `param` as a CPU tensor: f32 for constants, its own dtype for integers and block data, and else `dtype`.

    Raises:
        WeftError: if a value is beyond the range of the dtype.
    """
    blocks = [np.atleast_1d(block) for block in stream_rows(param.recipe, reader)]
    array = np.concatenate(blocks) if len(blocks) > 1 else blocks[0]
    tensor = torch.tensor(np.ascontiguousarray(array)).reshape(param.type.concrete({}))  # a copy: readers keep theirs
    kind = get_stored_dtype(param, dtypes.parse(str(dtype).removeprefix("torch.")))
    stored = tensor.to(getattr(torch, TORCH_NAMES[kind.name]))
    if kind.is_float and not param.recipe.is_constant and not torch.isfinite(stored).all():
        cast_finite(array, kind, param.name)  # raises
    return stored


def assign_weights(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the weights of `module` by `tensors` (state_dict key → tensor), without copies; dtypes may differ.

    Raises:
        WeftError: naming a key that is missing, unknown or of another shape.
    """
    expected = module.state_dict()
    if missing := expected.keys() - tensors.keys():
        raise WeftError(f"the state_dict has no {sorted(missing)[0]} ({len(missing)} missing of {len(expected)})")
    if extra := tensors.keys() - expected.keys():
        raise WeftError(f"the state_dict has {sorted(extra)[0]}, which is not in the model ({len(extra)} unknown)")
    for key, value in tensors.items():
        if value.shape != expected[key].shape:
            raise WeftError(
                f"{key} is {list(value.shape)} in the state_dict, but {list(expected[key].shape)} in the model"
            )
    # Assigned, because nothing can be copied into meta tensors.
    module.load_state_dict(tensors, assign=True)


def run_source(text: str) -> types.ModuleType:
    """Execute the source `text` as a Python module in `sys.modules`, once for equal sources, and return the module."""
    name = f"weft_generated_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    path = f"<{name}>"
    module = types.ModuleType(name)
    module.__file__ = path
    # Without a file, inspect and tracebacks read the source from this cache.
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    sys.modules[name] = module
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == name:
            copyreg.pickle(kind, _reduce)
    return module


def _reduce(instance: Any) -> tuple[Any, ...]:
    """Return the pickle reduction of an instance: source and name of its class, attributes, items of a list."""
    kind = type(instance)
    text = "".join(linecache.getlines(f"<{kind.__module__}>"))
    items = iter(instance) if isinstance(instance, list) else None
    return _rebuild, (text, kind.__qualname__), instance.__dict__, items


def _rebuild(text: str, name: str) -> Any:
    kind = getattr(run_source(text), name)
    return kind.__new__(kind)


def parse_device(device: torch.device | str) -> torch.device:
    """Return `device` as a `torch.device`.

    Raises:
        WeftError: if this PyTorch cannot use it.
    """
    try:
        check_device(str(device), "use device cpu")
    except Failure as failure:
        raise WeftError(str(failure)) from None
    return torch.device(device)
