"""References of elementwise ops, activations, norms, products and reductions against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.ir import ops
from weft.ir.op import OPS, Trait
from weft.ir.ops.activation import ACTIVATIONS, apply_activation

RNG = np.random.default_rng(11)
X = RNG.standard_normal((3, 4, 6)) * 2
Y = RNG.standard_normal((4, 6))
POS = np.abs(X) + 0.1
N, J = RNG.integers(-9, 9, (3, 5)), RNG.integers(1, 5, (3, 5))
W, BIAS = RNG.standard_normal((5, 6)), RNG.standard_normal(5)
G, H = RNG.standard_normal(6), RNG.standard_normal(6)
BITS = X > 0


def t(x: Any) -> Any:
    return None if x is None else torch.from_numpy(np.asarray(x))


ORACLES: dict[str, list[tuple[tuple[Any, ...], dict[str, Any], Callable[..., Any]]]] = {
    "add": [((X, Y), {}, torch.add), ((N, J), {}, torch.add)],
    "sub": [((X, Y), {}, torch.sub)],
    "mul": [((X, Y), {}, torch.mul)],
    "div": [((X, np.abs(Y) + 1), {}, torch.div)],
    "pow": [((POS, Y), {}, torch.pow)],
    "minimum": [((X, Y), {}, torch.minimum)],
    "maximum": [((X, Y), {}, torch.maximum)],
    "floordiv": [((N, J), {}, lambda i, j: torch.div(i, j, rounding_mode="floor"))],
    "mod": [((N, J), {}, torch.remainder)],
    "less": [((X, Y), {}, torch.lt)],
    "less_equal": [((N, J), {}, torch.le)],
    "equal": [((N, J), {}, torch.eq)],
    "logical_and": [((BITS, BITS[:1]), {}, torch.logical_and)],
    "logical_or": [((BITS, BITS[:1]), {}, torch.logical_or)],
    "logical_not": [((BITS,), {}, torch.logical_not)],
    **{name: [((X,), {}, getattr(torch, name))] for name in ("neg", "abs", "square", "exp", "sin", "cos", "tanh")},
    **{name: [((POS,), {}, getattr(torch, name))] for name in ("log", "sqrt", "rsqrt", "reciprocal")},
    **{name: [((X,), {}, getattr(torch, name))] for name in ("floor", "ceil", "round", "erf", "sigmoid", "relu")},
    "softplus": [((X,), {}, F.softplus), ((np.array([-800.0, 800.0]),), {}, F.softplus)],
    "dropout": [((X,), {"share": 0.3}, lambda x: F.dropout(x, 0.3, training=False))],
    "cast": [((X,), {"to": ops.cast.attrs["to"].default}, lambda x: x)],
    "clip": [
        ((X,), {"low": -0.3, "high": None}, lambda x: x.clip(-0.3)),
        ((N,), {"low": -2.0, "high": 3.0}, lambda i: i.clip(-2, 3)),
    ],
    "affine": [
        ((X,), {"by": 0.3, "plus": -2.0}, lambda x: x * 0.3 - 2),
        ((N,), {"by": 3.0, "plus": 1.0}, lambda i: 3 * i + 1),
    ],
    "where": [((BITS, X, Y), {}, torch.where)],
    "gelu": [
        ((X,), {"approximate": "none"}, F.gelu),
        ((X,), {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
        ((X,), {"approximate": "sigmoid"}, lambda x: x * torch.sigmoid(1.702 * x)),
    ],
    "swish": [((X,), {"beta": 1.0}, F.silu), ((X,), {"beta": 1.7}, lambda x: x / (1 + torch.exp(-1.7 * x)))],
    "elu": [((X,), {"alpha": 1.0}, F.elu), ((X,), {"alpha": 0.4}, lambda x: F.elu(x, 0.4))],
    "relu2": [((X,), {}, lambda x: F.relu(x) ** 2)],
    "rms_norm": [
        ((X, G), {"eps": 1e-3}, lambda x, w: F.rms_norm(x, (6,), w, 1e-3)),
        ((X,), {"eps": 1e-6}, lambda x: F.rms_norm(x, (6,), None, 1e-6)),
    ],
    "norm_linear": [
        ((X, W, BIAS), {"eps": 1e-3}, lambda x, w, b: F.linear(F.rms_norm(x, (6,), None, 1e-3), w, b)),
        (
            (X, W - W.mean(1, keepdims=True), BIAS),
            {"kind": "layer", "eps": 1e-3},
            lambda x, w, b: F.linear(F.layer_norm(x, (6,), eps=1e-3), w, b),
        ),
        (
            (X, W, None, G, H),
            {"kind": "layer", "eps": 1e-3, "activation": "gelu"},
            lambda x, w, _, g, h: F.gelu(F.linear(F.layer_norm(x, (6,), g, h, 1e-3), w)),
        ),
    ],
    "layer_norm": [
        ((X, G, H), {"eps": 1e-3}, lambda x, w, b: F.layer_norm(x, (6,), w, b, 1e-3)),
        ((X,), {"eps": 1e-5}, lambda x: F.layer_norm(x, (6,))),
    ],
    "linear": [((X, W), {}, F.linear), ((X, W, BIAS), {}, F.linear)],
    "matmul": [((X, Y.T), {}, torch.matmul), ((X[:, None], X.transpose(0, 2, 1)), {}, torch.matmul)],
    "embedding": [((J, W), {}, F.embedding)],
    "patch_embedding": [
        (
            (RNG.standard_normal((2, 3, 8, 12)), RNG.standard_normal((5, 3, 4, 4)), np.arange(5.0)),
            {},
            lambda x, w, b: F.conv2d(x, w, b, stride=4).flatten(2).transpose(1, 2),
        )
    ],
    "conv1d": [
        (
            (RNG.standard_normal((2, 9, 6)), RNG.standard_normal((4, 3, 4)), np.arange(4.0)),
            {"stride": 2, "padding": (2, 1), "groups": 2},
            lambda x, w, b: F.conv1d(F.pad(x.mT, (2, 1)), w, b, stride=2, groups=2).mT,
        )
    ],
    "softmax": [((X,), {"axis": -1}, lambda x: F.softmax(x, -1)), ((X * 400,), {"axis": 1}, lambda x: F.softmax(x, 1))],
    "sum": [((X,), {"axes": (0, 2), "keepdims": False}, lambda x: x.sum((0, 2)))],
    "mean": [((X,), {"axes": (-1,), "keepdims": True}, lambda x: x.mean(-1, keepdim=True))],
    "max": [((X,), {"axes": (1,), "keepdims": False}, lambda x: x.amax(1))],
    "min": [((X,), {"axes": (0, 1), "keepdims": True}, lambda x: x.amin((0, 1), keepdim=True))],
    "prod": [((X,), {"axes": (1,), "keepdims": False}, lambda x: x.prod(1))],
    "cumsum": [
        ((X,), {"axis": 1, "exclusive": False}, lambda x: x.cumsum(1)),
        ((N,), {"axis": -1, "exclusive": True}, lambda i: F.pad(i, (1, 0)).cumsum(-1)[:, :-1]),
    ],
    "fourier": [((X,), {}, lambda x: torch.fft.fft2(x).real)],
    "top_k": [((X,), {"k": 3}, lambda x: torch.topk(x, 3))],
    "reshape": [((X,), {"shape": (12, 6)}, lambda x: x.reshape(12, 6))],
    "transpose": [((X,), {"axes": (2, 0, 1)}, lambda x: x.permute(2, 0, 1))],
    "squeeze": [((X[:, :1],), {"axes": (1,)}, lambda x: x.squeeze(1))],
    "unsqueeze": [((X,), {"axes": (0, 4)}, lambda x: x[None, ..., None])],
    "expand": [((Y[:1],), {"shape": (2, 4, 6)}, lambda y: y.expand(2, 4, 6))],
    "concat": [((X, X[:, :1]), {"axis": -2}, lambda x, y: torch.cat([x, y], 1))],
    "split": [((X,), {"sizes": (1, 2, 3), "axis": -1}, lambda x: x.split([1, 2, 3], -1))],
    "slice": [((X,), {"axis": 2, "start": 1, "stop": 6, "step": 2}, lambda x: x[..., 1:6:2])],
    "gather": [((X, J - 1), {"axis": 1}, lambda x, j: x[:, j]), ((Y, J - 1), {"axis": 0}, lambda y, j: y[j])],
    "gather_rows": [((X, J - 1), {}, lambda x, j: x.gather(1, j[..., None].expand(-1, -1, 6)))],
    "scatter_rows": [
        (
            (X, -X[:, :2], J[:, :2] - 1),
            {"axis": 1},
            lambda x, rows, j: torch.stack([a.index_put((i,), r) for a, r, i in zip(x, rows, j, strict=True)]),
        )
    ],
    "iota": [((X,), {"axis": 1}, lambda x: torch.arange(4))],
    "one_hot": [((J,), {"depth": 7}, lambda j: F.one_hot(j, 7).double())],
    "pad": [((X,), {"axis": 1, "before": 1, "after": 2, "value": 0.5}, lambda x: F.pad(x, (0, 0, 1, 2), value=0.5))],
    "head_linear": [
        ((X, Y.reshape(12, 2)[:9]), {"heads": 3}, lambda x, w: x @ torch.block_diag(*w.chunk(3)).T),
        ((X, Y.reshape(12, 2)[:6]), {"heads": 3, "inverse": True}, lambda x, w: x @ torch.block_diag(*w.chunk(3))),
    ],
}  # fmt: skip
# Their oracles are in the test_reference_* files beside this one.
ELSEWHERE = {
    *("glu", "pack", "add_norm", "attention", "rope", "relative_position_bias", "alibi", "relative_attention", "route"),
    *("block_sparse_attention", "lightning_index"),
    *(
        "limit_capacity",
        "expert_choice",
        "load_balance_loss",
        "moe",
        "linear_attention",
        "causal_conv",
        "choose_tokens",
    ),
    *("selective_scan", "ssd", "gated_linear_attention", "gated_delta_rule", "scan"),
}


def test_every_op_has_an_independent_oracle() -> None:
    """Fused ops are their bodies; tests of kernels hold them against what is written for these."""
    fused = {name for name, op in OPS.items() if Trait.FUSED in op.traits}
    assert (set(ORACLES) | ELSEWHERE) - fused == set(OPS) - fused


@pytest.mark.parametrize("name", ORACLES)
def test_reference_is_torch(name: str) -> None:
    for operands, attrs, oracle in ORACLES[name]:
        wanted = oracle(*map(t, operands))
        found = OPS[name].run_reference(operands, attrs)
        for f, w in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            assert f.shape == tuple(w.shape)
            np.testing.assert_allclose(f, w.numpy(), rtol=1e-12, atol=1e-14)


def test_softmax_of_nothing_is_zero() -> None:
    x = np.array([[-np.inf, -np.inf], [0.0, -np.inf]])
    np.testing.assert_array_equal(ops.softmax.reference(x), [[0, 0], [1, 0]])


def test_top_k_takes_the_first_of_equals() -> None:
    values, indices = ops.top_k.reference(np.array([1.0, 3.0, 3.0, 0.0, 3.0]), k=2)
    assert (values.tolist(), indices.tolist()) == ([3, 3], [1, 2])


GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": F.elu,
    "identity": lambda x: x,
    "swish(0.5)": lambda x: x * torch.sigmoid(0.5 * x),
}


def test_every_activation_is_compared() -> None:
    assert set(GATES) == {*ACTIVATIONS, "identity", "swish(0.5)"}


@pytest.mark.parametrize("name", GATES)
def test_gated_units(name: str) -> None:
    gate, up = X, X[::-1]
    np.testing.assert_allclose(apply_activation(gate, name), GATES[name](t(gate)), rtol=1e-12, atol=1e-14)
    wanted = GATES[name](t(gate)) * t(up.copy())
    np.testing.assert_allclose(ops.glu.reference(gate, up, activation=name), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("gelu_tanh", "gelu_new"), ("gelu_quick", "quick_gelu"), ("relu2", "relu2"), ("gelu", "gelu"), ("silu", "swish")],
)
def test_activations_are_those_of_transformers(ours: str, theirs: str) -> None:
    from transformers.activations import ACT2FN

    np.testing.assert_allclose(apply_activation(X, ours), ACT2FN[theirs](t(X)), rtol=1e-12, atol=1e-14)


def test_glu_layer_of_torch() -> None:
    both = np.concatenate([X[..., :3], X[..., 3:]], -1)  # torch: first half ⊙ σ(second half)
    found = ops.glu.reference(both[..., 3:], both[..., :3], activation="sigmoid")
    np.testing.assert_allclose(found, F.glu(t(both)), rtol=1e-12)


def test_feed_forward_of_torch_encoder_layer() -> None:
    """ReLU FFN with biases and post-norm: the second half of torch.nn.TransformerEncoderLayer."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True, dtype=torch.float64)
    w1, b1, w2, b2 = (p.detach().numpy() for p in (*layer.linear1.parameters(), *layer.linear2.parameters()))
    hidden = ops.relu.reference(ops.linear.reference(X, w1, b1))
    residual = X + ops.linear.reference(hidden, w2, b2)
    norm = [p.detach().numpy() for p in layer.norm2.parameters()]
    found = ops.layer_norm.reference(residual, *norm, eps=layer.norm2.eps)
    wanted = layer.norm2(t(X) + layer._ff_block(t(X))).detach()
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_add_norm(kind: str) -> None:
    other = X[::-1].copy()
    normed, total = ops.add_norm.reference(X, other, G, H if kind == "layer" else None, kind=kind, eps=1e-4)
    np.testing.assert_array_equal(total, X + other)
    wanted = F.rms_norm(t(total), (6,), t(G), 1e-4) if kind == "rms" else F.layer_norm(t(total), (6,), t(G), t(H), 1e-4)
    np.testing.assert_allclose(normed, wanted, rtol=1e-12, atol=1e-13)
