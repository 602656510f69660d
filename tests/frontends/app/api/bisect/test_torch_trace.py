"""Traces of PyTorch modules: operations with their dependencies, paths of modules, and constants."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from weft.frontends.app.api.bisect.torch_trace import trace_module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(9, 8), nn.Sequential(nn.Linear(8, 8), nn.SiLU())
        self.register_buffer("mask", torch.arange(8) % 2)

    def forward(self, input_ids: torch.Tensor, double: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(input_ids)
        y = self.inner(x).add_(x) * self.mask
        return y * 2 if double else y, x


def test_operations_are_linked_named_by_module_and_run_again() -> None:
    torch.manual_seed(0)
    net, ids = Net(), np.array([[1, 2, 3]])
    trace = trace_module(net, {"input_ids": ids}, ["y", "x"])
    with torch.no_grad():
        y, x = net(torch.tensor(ids))
    np.testing.assert_array_equal(trace.values[trace.outputs["y"]], y.numpy())
    np.testing.assert_array_equal(trace.values[trace.outputs["x"]], x.numpy())
    assert trace.labels["inner.0"].startswith("inner.0.") and trace.labels["inner"] == trace.labels["inner.1"]
    assert {"embed.weight", "inner.0.weight.T", "inner.0.bias"} <= trace.constants.keys()
    silu = next(op for op in trace.operations if op.op == "silu")
    assert silu.name == "inner.1" and "input_ids" in trace.find_ancestors(silu.reads)
    operand = trace.load(silu.reads[0])
    assert operand is not None
    np.testing.assert_array_equal(silu.run([operand], {})[0], trace.values[silu.makes[0]])
    np.testing.assert_allclose(silu.run([0 * operand], {})[0], 0)
    last = next(op for op in trace.operations if trace.outputs["y"] in op.makes)
    assert any(name in trace.constants for name in last.reads)


def test_an_operation_in_place_makes_a_new_value() -> None:
    trace = trace_module(Net(), {"input_ids": np.array([[1, 2]])}, ["y"])
    add = next(op for op in trace.operations if op.op == "add_")
    assert add.makes[0] != add.reads[0] and not np.array_equal(trace.values[add.makes[0]], trace.values[add.reads[0]])


def test_scalars_are_attributes_and_hooks_are_removed() -> None:
    net = Net()
    trace = trace_module(net, {"input_ids": np.array([[1, 2]])}, ["y"], double=True)
    double = trace.makers[trace.outputs["y"]]
    operands = [trace.load(name) for name in double.reads]
    assert all(part._forward_hooks == {} == part._forward_pre_hooks for part in net.modules())
    np.testing.assert_array_equal(double.run(operands, double.attrs)[0], trace.values[trace.outputs["y"]])
    assert trace_module(net.bfloat16(), {"input_ids": np.array([[1]])}, ["y"]).dtype == "bf16"
