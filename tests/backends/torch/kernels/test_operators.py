"""Operators of torch that modules call kernels by, which compiled and exported models keep."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.backends.torch import kernels
from weft.backends.torch.kernels.prefill.dequantize_weights import dequantize_codes
from weft.backends.torch.kernels.shared.launch import custom_operator
from weft.backends.torch.lib.quantized import QuantizedLinear, block_linear
from weft.backends.torch.lib.windows import KeyVisibility, attend

from ....sampling import each, others_long


class Windowed(nn.Module):
    """Attention of new tokens to the last 20 keys of a text."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.start = start
        self.sinks = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(k.shape[2])[None]
        seen = KeyVisibility(at[:, self.start :], at, lambda i, j: (j <= i) & (i - j < 20), self.start)
        return attend(q, k, v, seen, window=20, softcap=30.0, sinks=self.sinks)


def product(**forms: Any) -> QuantizedLinear:
    """Of 192 numbers with random codes."""
    net = QuantizedLinear(192, 40, bias=True, scales=torch.float32, **forms)
    draw = torch.Generator().manual_seed(1)
    net.codes.view(torch.uint8).random_(0, 120, generator=draw)  # floats below 448
    net.scales.uniform_(0.01, 0.02, generator=draw)
    if net.offsets is not None:
        net.offsets.uniform_(-0.01, 0.01, generator=draw)
    assert net.bias is not None
    nn.init.uniform_(net.bias)
    return net


def heads(queries: int, keys: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, h, n, 16, generator=draw) for h, n in ((4, queries), (2, keys), (2, keys)))


Case = tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]], str]
CASES: dict[str, Case] = {  # with the operators of few tokens and of many
    "a window": (Windowed, lambda n: heads(n + 40, n + 40), "launch_window_attention"),
    "a window after other tokens": (
        lambda: Windowed(30),
        lambda n: heads(n, n + 30),
        "launch_window_attention",
    ),
    "codes": (
        lambda: product(bits=4, group=64, offsets=True),
        lambda n: (torch.randn(n, 192, generator=torch.Generator().manual_seed(n)),),
        "launch_norm_linear dequantize_codes",
    ),
    "floats for both": (
        lambda: product(bits=8, group=192, floats=True, activations=True),
        lambda n: (torch.randn(2, n, 192, generator=torch.Generator().manual_seed(n)),),
        "launch_norm_linear launch_quantize dequantize_codes",
    ),
}


def operators(graph: torch.fx.Graph) -> set[str]:
    """Names of the operators of weft that the graph calls."""
    found = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return {name.split(".")[1] for name in found if name.startswith("weft.")}


@pytest.mark.parametrize("name", others_long(CASES, 2))
@torch.no_grad()
def test_compiled_models_call_kernels(name: str, device: torch.device) -> None:
    """Whole graphs are captured, with one number of tokens after the other."""
    make, given, named = CASES[name]
    net, graphs = make().to(device), []

    def keep(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    torch.compiler.reset()
    compiled = torch.compile(net, backend=keep, fullgraph=True)
    for n in (5, 70, 64):
        inputs = [x.to(device) for x in given(n)]
        torch.testing.assert_close(compiled(*inputs), net(*inputs), rtol=0, atol=0)
    called = [operators(graph) for graph in graphs]
    assert set().union(*called) == set(named.split()) and all(called)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_exported_models_call_kernels(name: str, device: torch.device) -> None:
    """One program is for any number of tokens."""
    make, given, named = CASES[name]
    net = make().to(device)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    beyond = [x.shape[-2] - 70 for x in given(70)]
    lengths = [{len(x.shape) - 2: tokens + more if more else tokens} for x, more in zip(given(70), beyond, strict=True)]
    program = torch.export.export(net, tuple(x.to(device) for x in given(70)), dynamic_shapes=tuple(lengths))
    assert operators(program.graph) == {named.split()[-1]}
    run = program.module()
    if isinstance(net, QuantizedLinear):  # numbers of tokens unknown, its activations stay as they are
        net.product = block_linear
    for n in (5, 70, 64):
        inputs = [x.to(device) for x in given(n)]
        torch.testing.assert_close(run(*inputs), net(*inputs), rtol=1e-4, atol=1e-4)


def test_models_from_two_folders_share_operators(device: torch.device) -> None:
    """Each folder has kernels of its own, and what one has compiled lives on when another is opened."""
    codes = torch.zeros(4, 64, device=device).to(torch.float8_e4m3fn)
    given = (codes, torch.ones(1, 4, device=device), None, 8, 64, torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(dequantize_codes, backend="aot_eager", fullgraph=True)
    first = compiled(*given)
    folder = Path(kernels.__path__[0])
    spec = importlib.util.spec_from_file_location("copied", folder / "__init__.py")
    assert spec is not None
    sys.modules["copied"] = importlib.util.module_from_spec(spec)
    copy = importlib.import_module("copied.prefill.dequantize_weights")
    try:
        assert copy.dequantize_codes is not dequantize_codes
        torch.compiler.reset()
        for function in (compiled, torch.compile(copy.dequantize_codes, backend="aot_eager", fullgraph=True)):
            assert torch.equal(function(*given), first)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "copied"]:
            del sys.modules[name]


def test_operator_names_include_the_kernels_version() -> None:
    def dequantize_codes(x: Tensor) -> Tensor:
        return x + 1

    other = custom_operator(torch.empty_like)(dequantize_codes)
    torch.compiler.reset()
    x = torch.ones(3)
    assert torch.equal(torch.compile(other, backend="eager", fullgraph=True)(x), x + 1)
    assert str(torch.ops.weft.dequantize_codes.default._schema).startswith("weft::dequantize_codes(Tensor packed")


@pytest.mark.parametrize("name", each(2, CASES, 1))
def test_gradients_work_without_kernels(name: str, device: torch.device) -> None:
    """Torch differentiates its own operators, compiled or not."""
    make, given, _ = CASES[name]
    net, inputs = make().to(device), [x.to(device).requires_grad_() for x in given(70)]
    torch.compiler.reset()
    compiled = torch.compile(net, backend="aot_eager")
    for model in (net, compiled):
        model(*inputs).square().sum().backward()
    for x in inputs:
        assert x.grad is not None and x.grad.abs().sum() > 0
