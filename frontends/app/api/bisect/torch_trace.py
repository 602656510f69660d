"""Traces of PyTorch modules: every ATen operation that reads a value computed from the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from weft.backends.alignment.traces import Operation, ValueTrace
from weft.backends.viz.onnx_files.scopes import make_unique
from weft.ir.recipes.readers import Array

DTYPES = {torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}


def trace_module(module: nn.Module, inputs: Mapping[str, Array], outputs: Sequence[str], **options: Any) -> ValueTrace:
    """Return the trace of ``module(**inputs, **options)``; `outputs` names its results if they have no names.

    An operation is called after the module that runs it; the path of a module is a label of the value that it returns.
    """
    tensors = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in inputs.items()}
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    trace = ValueTrace(values=dict(inputs), dtype=DTYPES.get(dtype, "f32"))
    recorder = _Recorder(trace, {id(x): name for name, x in tensors.items()}, module)
    with torch.no_grad(), recorder:
        results = module.eval()(**tensors, **options)
    for handle in recorder.handles:
        handle.remove()
    if not isinstance(results, Mapping):
        results = dict(zip(outputs, results if isinstance(results, tuple) else (results,), strict=False))
    trace.outputs = {name: recorder.names[id(x)] for name, x in results.items() if id(x) in recorder.names}
    return trace


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of PyTorch
    """A mode that records operations on tensors with a name, which are the inputs and everything computed from them."""

    def __init__(self, trace: ValueTrace, names: dict[int, str], module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of PyTorch
        self.trace, self.names = trace, names  # names of tensors by id
        self.alive: list[torch.Tensor] = []  # so that no id is used again
        self.used, self.path = set(trace.values), [""]
        tensors = (*module.named_buffers(), *module.named_parameters())
        self.parameters, self.tables = {p.data_ptr(): name for name, p in tensors}, dict[int, str]()
        self.handles = []
        for path, part in module.named_modules():
            self.handles.append(part.register_forward_pre_hook(partial(self.enter, path)))
            self.handles.append(part.register_forward_hook(self.leave, always_call=True))

    def enter(self, path: str, *_: Any) -> None:
        self.path.append(path)

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if (path := self.path.pop()) and id(output) in self.names:
            self.trace.labels[path] = self.names[id(output)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree = tree_flatten((args, kwargs or {}))
        is_traced = any(id(x) in self.names for x in leaves if isinstance(x, torch.Tensor))
        # Before an operation in place renames its operand.
        reads = [self._name_operand(x) if is_traced and isinstance(x, torch.Tensor) else "" for x in leaves]
        result = func(*args, **(kwargs or {}))
        if is_traced:
            scope, op = self.path[-1], func.__name__.partition(".")[0]
            makes = [self._add(x, f"{scope}.{op}" if scope else op) for x in _list_tensors(result)]
            indices = tree_unflatten(range(len(leaves)), tree)
            named = dict(zip((a.name for a in func._schema.arguments), indices[0], strict=False)) | indices[1]
            places = {
                name: i for name, i in named.items() if isinstance(i, int) and isinstance(leaves[i], bool | float)
            }
            attrs = {name: leaves[i] for name, i in places.items()}
            run = partial(_run, func, leaves, tree, places)
            self.trace.operations.append(Operation(op, scope or op, tuple(reads), tuple(makes), attrs, run))
        return result

    def _add(self, tensor: torch.Tensor, name: str) -> str:
        self.alive.append(tensor)
        self.names[id(tensor)] = name = make_unique(name, self.used)
        self.trace.values[name] = _to_numpy(tensor)
        return name

    def _name_operand(self, x: torch.Tensor) -> str:
        """Return the name of a value, or of a constant, which is recorded when it is first read."""
        if id(x) in self.names:
            return self.names[id(x)]
        label = self.parameters.get(x.data_ptr()) or self.tables.setdefault(
            x.data_ptr(), f"constant {len(self.tables)}"
        )
        name = label + ("" if x.is_contiguous() else ".T")
        self.alive.append(x)
        self.trace.constants.setdefault(name, (tuple(x.shape), partial(_to_numpy, x)))
        return name


def _run(
    func: Any,
    leaves: list[Any],
    tree: Any,
    places: Mapping[str, int],
    operands: Sequence[Array | None],
    attrs: Mapping[str, Any],
) -> Any:
    """Return the results of `func`, called with its former arguments, except for `operands` and scalar `attrs`, whose
    `places` are indices of `leaves`."""
    new = [*leaves]
    for name, i in places.items():
        new[i] = attrs[name]
    for i, (leaf, x) in enumerate(zip(leaves, operands, strict=True)):
        if isinstance(leaf, torch.Tensor) and x is not None:
            new[i] = torch.tensor(x, dtype=leaf.dtype)
    args, kwargs = tree_unflatten(new, tree)
    with torch.no_grad():
        return [_to_numpy(x) for x in _list_tensors(func(*args, **kwargs))]


def _list_tensors(result: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]


def _to_numpy(tensor: torch.Tensor) -> Array:
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    return np.array(tensor.detach().cpu().to(torch.float32 if half else tensor.dtype).numpy())
