"""Run every example case of every op as a generated module, against its reference in float64.

`make test` runs each case in one dtype, by turns. The cases of an op are tests of the module that lowers it.
"""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weft.backends.torch.codegen.model_source import write_source
from weft.backends.torch.program.registry import LOWERINGS
from weft.ir import OPS, Graph, TensorType, Value, dtypes
from weft.ir import ops as _all  # noqa: F401 - fills OPS
from weft.ir.recipes import Normal
from weft.ir.testing import build_node_graph

from ....lowered import build_module, lower
from ....sampling import each
from ..generated import errors, tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = {"weight", "bias", "table", "up", "down", "gate", "key_table", "value_table", "slopes"}
ROUNDINGS = 8  # to the dtype, from operands to result: those of attention, one after the other
TERMS = 150  # tokens of the longest case


def find_module(name: str) -> str:
    """Return the name of the module of backends/torch/ops that lowers the op `name`; "" for ops that have no lowering,
    because they are rewritten before."""
    lowerings = LOWERINGS.get(name, [])
    return lowerings[-1].emit.__module__.rpartition(".")[2] if lowerings else ""


def examples(module: str) -> list[object]:
    """Return the cases (op, number, weights as parameters, dtype) of the ops that `module` lowers."""
    found = []
    for op in OPS.values():
        if find_module(op.name) != module:
            continue
        as_weights = [False, True] if WEIGHTS.intersection(o.name for o in op.operands) else [False]
        found += [
            pytest.param(
                op.name, i, held, dtype, id=f"{op.name}-{i}-{'weights' if held else 'inputs'}-{str(dtype)[6:]}"
            )
            for i in range(len(op.cases))
            for held in as_weights
            for dtype in each(3, DTYPES, (i + held) % 3)
        ]
    return found


@functools.cache
def _built(name: str, number: int, held: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Build the module of a case in float32; return it with its inputs in float64."""
    weights = WEIGHTS if held else ()
    graph, feeds = build_node_graph(OPS[name], OPS[name].cases[number], weights=weights)
    return build_module(graph), feeds


def check(name: str, number: int, held: bool, dtype: torch.dtype) -> None:
    """Check a case of op `name` in `dtype`, with its weights as parameters if `held`, else as inputs."""
    op, example = OPS[name], OPS[name].cases[number]
    module, feeds = _built(name, number, held)
    module = copy.deepcopy(module).to(dtype).eval()
    given = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors(feeds, torch.float64).items()}
    known, operands = {**module.state_dict(), **given}, []
    for i, array in enumerate(example.draw()):
        operand = op.operands[min(i, len(op.operands) - 1)]
        tensor = None if array is None else known[f"{operand.name}{i}" if operand.variadic else operand.name]
        exact = None if tensor is None else tensor.double() if tensor.is_floating_point() else tensor
        operands.append(None if exact is None else exact.numpy())
    wanted, made = op.reference(*operands, **example.attrs), module(**given)
    wanted, made = (x if isinstance(x, tuple) else (x,) for x in (wanted, made))
    narrow, inner = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    for got, want in zip(made, map(np.asarray, wanted), strict=True):
        finite = np.asarray(np.isfinite(want.astype(np.float64)))
        np.testing.assert_array_equal(np.where(finite, 0, got.detach().double()), np.where(finite, 0, want))
        off = errors(torch.where(torch.from_numpy(finite), got.detach(), 0), np.where(finite, want, 0))
        bound = 0.5 * ROUNDINGS * narrow + 8 * inner * TERMS**0.5 if got.is_floating_point() else 0
        assert float(off.max(initial=0)) <= bound, f"{off.max():.2e} is more than {bound:.2e}"


Build = Callable[..., Value | tuple[Value, ...]]


def build_graph(make: Build, *shapes: tuple[Any, ...], dtype: dtypes.DType = dtypes.f32, **weights: Any) -> Graph:
    """Build the graph of make(*inputs, **parameters) with inputs x, y, z of these shapes, and parameters by name."""
    graph = Graph("example")
    inputs = [graph.add_input(n, TensorType(dtype, shape)) for n, shape in zip("xyz", shapes, strict=False)]
    params = {
        name: graph.add_param(f"{name}.weight", TensorType(dtypes.f32, shape), Normal(shape, 0.5, name))
        for name, shape in weights.items()
    }
    made = make(*inputs, **params)
    for i, value in enumerate(made if isinstance(made, tuple) else (made,)):
        graph.add_output(f"out{i}", value)
    return graph


def write_class(graph: Graph) -> str:
    """Return the source of the class of a graph's generated module, without docstring."""
    tree = ast.parse(write_source(lower(graph)).text)
    (model,) = (c for c in tree.body if isinstance(c, ast.ClassDef) and c.name == "Model")
    return ast.unparse(model.body[1:])


def write_forward(graph: Graph) -> str:
    """Return the statements of `forward` of a graph's generated module, one per line."""
    (forward,) = (f for f in ast.parse(write_class(graph)).body if getattr(f, "name", "") == "forward")
    assert isinstance(forward, ast.FunctionDef)
    return ast.unparse(forward.body)
