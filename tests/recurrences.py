"""Recurrences of papers written with `scan`, each with an independent definition in PyTorch.

Of each: what it makes of inputs [batch, seq, ...] and of its weights, and the same by whoever knows it best: an op of
weft with an oracle of its own, the class of transformers, or a loop over the equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from weft.frontends.dsl import State, linear, module, param, positions, scan
from weft.ir import Value, ops

HEADS, KEYS, VALUES, CHANNELS, STATES = 2, 4, 3, 6, 5


@dataclass(frozen=True)
class Recurrence:
    """`make` builds it of values, `define` computes it of tensors in float64: inputs, then weights, by shape.

    `squash` keeps what a model would keep in bounds (steps positive, gates in (0, 1), keys of norm 1), of all inputs.
    """

    make: Callable[..., Value]
    define: Callable[..., Tensor]
    inputs: dict[str, tuple[int, ...]]
    weights: dict[str, tuple[int, ...]]
    affine: bool = True


def _row(x: Value, *axes: int) -> Value:
    return ops.unsqueeze(x, axes=axes)


# -- Mamba


def _mamba(x: Value, dt: Value, b: Value, c: Value, a: Value) -> Value:
    rates, steps = -ops.exp(a), ops.softplus(dt)

    def step(h: Value, x: Value, dt: Value, b: Value, c: Value) -> tuple[Value, Value]:
        h = ops.exp(_row(dt, 2) * rates) * h + _row(dt * x, 2) * _row(b, 1)
        return h, ops.sum(h * _row(c, 1), axes=(2,))

    y: Value = scan(step, x, steps, b, c, state=(CHANNELS, STATES))
    return y


def _mamba_defined(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    """Every state as a sum over the tokens before it, without a recurrence."""
    rates, steps = -a.exp(), F.softplus(dt)
    sums = steps.cumsum(1)
    gaps = (sums[:, :, None] - sums[:, None])[..., None] * rates  # [batch, t, s, channels, states]
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[..., None, None]
    written = (steps * x)[:, None, :, :, None] * b[:, None, :, None]
    return ((gaps.masked_fill(~seen, -torch.inf).exp() * written).sum(2) * c[:, :, None]).sum(-1)


# -- gated linear attention


def _gla(q: Value, k: Value, v: Value, g: Value) -> Value:
    decay = -ops.softplus(g)

    def step(s: Value, q: Value, k: Value, v: Value, g: Value) -> tuple[Value, Value]:
        s = _row(ops.exp(g), 3) * s + _row(k, 3) * _row(v, 2)
        return s, ops.squeeze(_row(q, 2) @ s, axes=(2,))

    y: Value = scan(step, q, k, v, decay, state=(HEADS, KEYS, VALUES))
    return y


def _gla_defined(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Attention with scores Σ_d q_d k_d e^(sum of gates between)."""
    sums = -F.softplus(g).cumsum(1)
    gaps = sums[:, :, None] - sums[:, None]  # [batch, t, s, heads, keys]
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()[..., None, None]
    scores = (gaps.masked_fill(~seen, -torch.inf).exp() * q[:, :, None] * k[:, None]).sum(-1)
    return torch.einsum("btsh,bshe->bthe", scores, v)


# -- the gated linear recurrent unit of Griffin


def _rg_lru(x: Value, wi: Value, bi: Value, wr: Value, br: Value, rate: Value) -> Value:
    width = CHANNELS // HEADS

    def gate(x: Value, weight: Value, bias: Value) -> Value:
        heads = ops.reshape(x, shape=(x.shape[0], HEADS, 1, width))
        return ops.sigmoid(ops.reshape(heads @ weight + _row(bias, 1), shape=x.shape))

    def step(h: Value, x: Value, first: Value) -> tuple[Value, Value]:
        log_a = -8.0 * gate(x, wr, br) * ops.softplus(rate)
        a, first = ops.exp(log_a), _row(first, 1)
        grown = first + (1.0 - first) * ops.sqrt(1.0 - ops.exp(2.0 * log_a))
        h = (1.0 - first) * a * h + grown * gate(x, wi, bi) * x
        return h, h

    y: Value = scan(step, x, ops.cast(ops.equal(positions(x), 0), to=x.type.dtype), state=(CHANNELS,))
    return y


def _rg_lru_defined(x: Tensor, wi: Tensor, bi: Tensor, wr: Tensor, br: Tensor, rate: Tensor) -> Tensor:
    config = RecurrentGemmaConfig(lru_width=CHANNELS, num_attention_heads=HEADS, hidden_size=CHANNELS)
    module = RecurrentGemmaRglru(config).double()
    names = "input_gate_weight", "input_gate_bias", "recurrent_gate_weight", "recurrent_gate_bias", "recurrent_param"
    weights = dict(zip(names, (wi, bi, wr, br, rate), strict=True))
    module._rnn_scan = _in_float64.__get__(module)  # its own sums in float32
    y: Tensor = torch.func.functional_call(module, weights, (x, torch.arange(x.shape[1])[None].expand(len(x), -1)))
    return y


def _in_float64(self: Any, *, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **kwargs: Any) -> Any:
    states, rows = torch.zeros_like(hidden_states[:, 0]), []
    for t in range(hidden_states.shape[1]):
        states = (recurrent_gate * ~reset)[:, t] * states + hidden_states[:, t]
        rows.append(states)
    return torch.stack(rows, 1), states


# -- the scalar LSTM of xLSTM, with a stabilizer


def _slstm(x: Value, r: Value) -> Value:
    n = CHANNELS

    def step(states: tuple[Value, ...], x: Value) -> tuple[tuple[Value, ...], Value]:
        c, n_, m, h = states
        z, i, f, o = ops.split(x + h @ r, sizes=(n, n, n, n), axis=-1)
        f = -ops.softplus(-f)  # log sigmoid
        most = ops.maximum(f + m, i)
        kept, new = ops.exp(f + m - most), ops.exp(i - most)
        c = kept * c + new * ops.tanh(z)
        n_ = kept * n_ + new
        h = ops.sigmoid(o) * c / n_
        return (c, n_, most, h), h

    y: Value = scan(step, x, state={"c": (n,), "n": (n,), "m": State((n,), -1e30), "h": (n,)})
    return y


def _slstm_defined(x: Tensor, r: Tensor) -> Tensor:
    """Without the stabilizer, which cancels."""
    c = n = h = torch.zeros_like(x[:, 0, :CHANNELS])
    rows = []
    for t in range(x.shape[1]):
        z, i, f, o = (x[:, t] + h @ r).chunk(4, -1)
        c = torch.sigmoid(f) * c + i.exp() * z.tanh()
        n = torch.sigmoid(f) * n + i.exp()
        h = torch.sigmoid(o) * c / n
        rows.append(h)
    return torch.stack(rows, 1)


# -- the delta rule


def _delta(q: Value, k: Value, v: Value, beta: Value) -> Value:
    def step(s: Value, q: Value, k: Value, v: Value, beta: Value) -> tuple[Value, Value]:
        k = k / _row(ops.sqrt(ops.sum(ops.square(k), axes=(2,)) + 1e-6), 2)
        known = ops.squeeze(_row(k, 2) @ s, axes=(2,))
        s = s + _row(k, 3) * _row((v - known) * _row(ops.sigmoid(beta), 2), 2)
        return s, ops.squeeze(_row(q, 2) @ s, axes=(2,))

    y: Value = scan(step, q, k, v, beta, state=(HEADS, KEYS, VALUES))
    return y


def _delta_defined(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """S ← (I − β k kᵀ) S + β k vᵀ with whole matrices."""
    k, beta = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt(), beta.sigmoid()[..., None, None]
    s, rows = torch.zeros(len(q), HEADS, KEYS, VALUES, dtype=q.dtype), []
    for t in range(q.shape[1]):
        outer = k[:, t, :, :, None] * k[:, t, :, None]
        s = (torch.eye(KEYS, dtype=q.dtype) - beta[:, t] * outer) @ s
        s = s + beta[:, t] * k[:, t, :, :, None] * v[:, t, :, None]
        rows.append(torch.einsum("bhd,bhde->bhe", q[:, t], s))
    return torch.stack(rows, 1)


_keys, _values, _width = (HEADS, KEYS), (HEADS, VALUES), CHANNELS // HEADS
RECURRENCES = {
    "mamba": Recurrence(
        *(_mamba, _mamba_defined),
        {"x": (CHANNELS,), "dt": (CHANNELS,), "b": (STATES,), "c": (STATES,)},
        {"a": (CHANNELS, STATES)},
    ),
    "gated linear attention": Recurrence(
        _gla, _gla_defined, {"q": _keys, "k": _keys, "v": _values, "g": _keys}, {}
    ),
    "rg-lru": Recurrence(
        *(_rg_lru, _rg_lru_defined, {"x": (CHANNELS,)}),
        {
            **{"wi": (HEADS, _width, _width), "bi": (HEADS, _width)},
            **{"wr": (HEADS, _width, _width), "br": (HEADS, _width), "rate": (CHANNELS,)},
        },
    ),
    "slstm": Recurrence(_slstm, _slstm_defined, {"x": (4 * CHANNELS,)}, {"r": (CHANNELS, 4 * CHANNELS)}, affine=False),
    "delta rule": Recurrence(_delta, _delta_defined, {"q": _keys, "k": _keys, "v": _values, "beta": (HEADS,)}, {}),
}  # fmt: skip


@module
class Mixer:
    """A layer around the recurrence called `kind`: its inputs are linear in those of the layer."""

    kind: str

    def __call__(self, x: Value) -> Value:
        recurrence = RECURRENCES[self.kind]

        def projected(name: str, row: tuple[int, ...]) -> Value:
            y = linear(x, math.prod(row), name)
            return y if len(row) == 1 else ops.reshape(y, shape=(*x.shape[:2], *row))

        values = [projected(name, row) for name, row in recurrence.inputs.items()]
        y = recurrence.make(*values, *(param(name, shape) for name, shape in recurrence.weights.items()))
        width = math.prod(y.shape[2:])
        return linear(y if len(y.shape) == 3 else ops.reshape(y, shape=(*x.shape[:2], width)), x.width, "o")
