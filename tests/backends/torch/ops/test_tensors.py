"""Ops that move elements, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from weft.ir import Value, ops
from weft.ir.types.sizes import sym

from .op_cases import build_graph, check, examples, write_forward

B, S = sym("batch"), sym("seq")


@pytest.mark.parametrize(("name", "number", "held", "dtype"), examples("tensors"))
def test_cases_agree_with_the_reference(name: str, number: int, held: bool, dtype: torch.dtype) -> None:
    check(name, number, held, dtype)


@pytest.mark.parametrize(
    ("make", "source"),
    [
        (lambda x: ops.reshape(x, shape=(B, S, 2, 4)), "x.unflatten(-1, (-1, 4))"),
        (lambda x: ops.reshape(ops.reshape(x, shape=(B, S, 2, 4)), shape=(B, S, 8)), "x"),
        (lambda x: ops.transpose(x, axes=(0, 2, 1)), "x.transpose(1, 2)"),
        (lambda x: ops.transpose(x, axes=(2, 0, 1)), "x.permute(2, 0, 1)"),
        (lambda x: ops.unsqueeze(x, axes=(1,)), "x[:, None]"),
        (lambda x: ops.slice_(x, axis=2, start=0, stop=4, step=2), "x[:, :, :4:2]"),
        (lambda x: ops.slice_(x, axis=2, start=3, stop=8), "x[:, :, 3:]"),
        (lambda x: ops.squeeze(ops.slice_(x, axis=2, start=2, stop=3), axes=(2,)), "x[:, :, 2]"),
        (lambda x: ops.squeeze(ops.unsqueeze(x, axes=(1, 2)), axes=(1, 2)), "x[:, None, None].squeeze((1, 2))"),
        (lambda x: ops.pad(x, axis=1, before=2, after=1), "F.pad(x, (0, 0, 2, 1), value=0.0)"),
        (lambda x: ops.concat(x, x, axis=1), "torch.cat((x, x), 1)"),
        (lambda x: ops.iota(x, axis=1), "torch.arange(x.shape[1], device=x.device)"),
        (
            lambda x: ops.one_hot(ops.iota(x, axis=1), depth=5),
            "F.one_hot(torch.arange(x.shape[1], device=x.device), 5).float()",
        ),
        (lambda x: ops.gather(x, ops.iota(x, axis=1), axis=1), "x[:, torch.arange(x.shape[1], device=x.device)]"),
    ],
)
def test_moves_of_elements_are_written_as_indexing_or_torch_functions(
    make: Callable[[Value], Value], source: str
) -> None:
    assert write_forward(build_graph(make, (B, S, 8))) == f"return {source}"


def test_ops_of_several_outputs_unpack_a_tuple() -> None:
    graph = build_graph(lambda x: ops.split.emit(x, sizes=(3, 5), axis=2), (B, S, 8))
    assert write_forward(graph) == "split, split_2 = x.split((3, 5), 2)\nreturn (split, split_2)"
    graph = build_graph(lambda x: ops.top_k.emit(x, k=2), (B, S, 8))
    assert write_forward(graph) == "values, indices = top_k(x, 2)\nreturn (values, indices)"


def test_an_expand_that_broadcasting_does_is_left_out() -> None:
    graph = build_graph(lambda x, y: ops.add(x, ops.expand(y, shape=(B, S, 8))), (B, S, 8), (1, 1, 8))
    assert write_forward(graph) == "return x + y"
    graph = build_graph(lambda x, y: ops.expand(y, shape=(3, 4, 8)), (B, S, 8), (1, 1, 8))
    assert write_forward(graph) == "return y.expand(3, 4, -1)"
