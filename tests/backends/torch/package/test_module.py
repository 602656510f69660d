"""Modules in this process: generated sources run as Python modules, and weights are assigned or rejected."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest
import torch
from torch import nn

from weft.backends.torch.package.module import assign_weights, evaluate_param, parse_device, run_source
from weft.ir import Graph, TensorType, WeftError
from weft.ir.recipes import Full, Literal
from weft.ir.recipes.readers import MemoryReader
from weft.ir.types import dtypes

SOURCE = "class Pair(list):\n    def first(self):\n        return self[0]\n"


def test_equal_sources_are_one_module_with_readable_source() -> None:
    module = run_source(SOURCE)
    assert run_source(SOURCE) is module
    assert inspect.getsource(module.Pair).startswith("class Pair(list):")
    pair = pickle.loads(pickle.dumps(module.Pair([3, 4])))
    assert (type(pair), pair.first()) == (module.Pair, 3)


def test_source_that_fails_is_not_kept() -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run_source("1 / 0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": None}, "the state_dict has no bias (1 missing of 2)"),
        ({"more": torch.ones(1)}, "the state_dict has more, which is not in the model (1 unknown)"),
        ({"bias": torch.ones(3)}, "bias is [3] in the state_dict, but [2] in the model"),
    ],
)
def test_mismatched_weights_are_named(change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = {key: t for key, t in (nn.Linear(4, 2).state_dict() | change).items() if t is not None}
    with pytest.raises(WeftError, match=re.escape(message)):
        assign_weights(nn.Linear(4, 2), tensors)


def test_weights_are_assigned_without_copies() -> None:
    module, tensors = nn.Linear(4, 2, device="meta"), nn.Linear(4, 2, dtype=torch.bfloat16).state_dict()
    assign_weights(module, tensors)
    assert module.weight.data_ptr() == tensors["weight"].data_ptr()


def test_parameters_are_evaluated_in_their_dtype() -> None:
    graph, reader = Graph("params"), MemoryReader({})
    table = graph.add_param("t", TensorType(dtypes.f32, (2,)), Literal((1.5, 2.5), (2,)))
    weight = graph.add_param("w", TensorType(dtypes.f32, (2,)), Full(70000.0, (2,)))
    index = graph.add_param("i", TensorType(dtypes.i32, (2,)), Literal((1.0, 2.0), (2,)))
    assert evaluate_param(table, reader, torch.bfloat16).dtype == torch.float32
    assert evaluate_param(index, reader, torch.bfloat16).tolist() == [1, 2]
    assert evaluate_param(weight, reader, torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(WeftError, match="w"):
        evaluate_param(weight, reader, torch.float16)  # beyond 65504


def test_unknown_device_is_refused() -> None:
    assert parse_device("cpu") == torch.device("cpu")
    with pytest.raises(WeftError, match="device 'tpu' is unknown to PyTorch: use cpu or cuda"):
        parse_device("tpu")
