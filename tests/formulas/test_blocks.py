"""Feed-forwards and residual arrangements (Shazeer 2020; Xiong 2020; Zhang & Sennrich 2019), written out."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from weft.frontends.dsl import MLP, Block, GatedMLP, LayerNorm, RMSNorm, trace
from weft.frontends.dsl.blocks import ARRANGEMENTS
from weft.ir import TensorType
from weft.ir.types import dtypes

from .harness import RUNNERS, Array, Row, Weights, check

ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_quick": lambda x: x / (1 + math.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "swish(1.5)": lambda x: x / (1 + math.exp(-1.5 * x)),
    "elu": lambda x: x if x > 0 else math.exp(x) - 1,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
    "identity": lambda x: x,
}
GATED = {
    "GLU": "sigmoid",
    "bilinear": "identity",
    "ReGLU": "relu",
    "GEGLU": "gelu",
    "SwiGLU": "silu",
    "Swish-GLU": "swish(1.5)",
    "tanh": "tanh",
}


def inside(w: Weights, scope: str) -> Weights:
    """The weights of `scope`, by their names in it."""
    return {n.removeprefix(scope): v for n, v in w.items() if n.startswith(scope)}


def plain(activation: str, scope: str = "", bias: bool = False) -> Callable[[Array, Weights], Array]:
    """act(x W₁ + b₁) W₂ + b₂ of the rows of x."""

    def formula(x: Array, w: Weights) -> Array:
        act, p = np.vectorize(ACTIVATIONS[activation]), inside(w, scope)
        inner = act(x @ p["up.weight"].T + (p["up.bias"] if bias else 0))
        return np.asarray(inner @ p["down.weight"].T + (p["down.bias"] if bias else 0))

    return formula


def gated(activation: str, scope: str = "", bias: bool = False) -> Callable[[Array, Weights], Array]:
    """(act(x W + b) ⊙ (x V + c)) W₂ + b₂ of the rows of x."""

    def formula(x: Array, w: Weights) -> Array:
        act, p = np.vectorize(ACTIVATIONS[activation]), inside(w, scope)
        opened = act(x @ p["gate.weight"].T + (p["gate.bias"] if bias else 0))
        inner = opened * (x @ p["up.weight"].T + (p["up.bias"] if bias else 0))
        return np.asarray(inner @ p["down.weight"].T + (p["down.bias"] if bias else 0))

    return formula


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward(activation: str, bias: bool, runner: str) -> None:
    check(Row(MLP(24, activation, bias), plain(activation, bias=bias)), runner)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", GATED)
def test_gated_feed_forward(name: str, bias: bool, runner: str) -> None:
    activation = GATED[name]
    check(Row(GatedMLP(24, activation, bias), gated(activation, bias=bias)), runner)


@pytest.mark.parametrize(("wide", "multiple", "hidden"), [(4 * 4096, 256, 11008), (4 * 512, 1, 1365), (96, 32, 64)])
def test_gating_matches_the_parameters_of_an_ungated_network(wide: int, multiple: int, hidden: int) -> None:
    """Three matrices of 2/3 the width are as large as two, up to the multiple (Shazeer 2020; 11008 is Llama's)."""
    matched, dim = GatedMLP.matched(wide, multiple), 8
    assert matched.hidden == hidden

    def parameters(module: GatedMLP | MLP) -> int:
        graph = trace(module, {"x": TensorType(dtypes.f32, (1, dim))})
        return sum(math.prod(p.shape) for p in graph.params.values())

    assert abs(parameters(matched) - parameters(MLP(wide))) <= 3 * dim * multiple


NORMS = {"layer": LayerNorm(1e-5), "rms": RMSNorm(1e-6)}


def normed(kind: str, x: Array, w: Weights, name: str) -> Array:
    rows = []
    for row in x:
        if kind == "rms":
            rows.append(row / math.sqrt((row**2).mean() + 1e-6) * w[f"{name}.weight"])
        else:
            centred = row - row.mean()
            rows.append(centred / math.sqrt((centred**2).mean() + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"])
    return np.array(rows)


def arranged(arrangement: str, kind: str) -> Callable[[Array, Weights], Array]:
    """A block whose mixer is a feed-forward too: what counts here is what stands between."""
    attn, ffn = plain("silu", "attn."), gated("gelu", "ffn.")

    def formula(x: Array, w: Weights) -> Array:
        def n(x: Array, name: str) -> Array:
            return normed(kind, x, w, name)

        if arrangement == "parallel":
            return x + attn(n(x, "norm"), w) + ffn(n(x, "norm"), w)
        if arrangement == "parallel_norms":
            return x + attn(n(x, "attn_norm"), w) + ffn(n(x, "ffn_norm"), w)
        for name, f in (("attn", attn), ("ffn", ffn)):
            match arrangement:
                case "pre":
                    x = x + f(n(x, f"{name}_norm"), w)
                case "pre_ffn":
                    x = x + (attn(x, w) if name == "attn" else ffn(n(x, "ffn_norm"), w))
                case "post":
                    x = n(x + f(x, w), f"{name}_norm")
                case "sandwich":
                    x = x + n(f(n(x, f"{name}_norm"), w), f"{name}_post_norm")
                case "post_sublayer":
                    x = x + n(f(x, w), f"{name}_post_norm")
                case _:
                    raise NotImplementedError(f"the formula of {arrangement}")
        return x

    return formula


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arrangement(arrangement: str, kind: str, runner: str) -> None:
    block = Block(MLP(24, "silu"), GatedMLP(20, "gelu"), NORMS[kind], arrangement)
    check(Row(block, arranged(arrangement, kind)), runner)
