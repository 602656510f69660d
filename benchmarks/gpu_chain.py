"""A Llama's decoding step written out in weft's kernels by hand, five a layer, on the weights of a Hugging Face model.

It says what the kernels make of a whole step by themselves: what a generated model is to be measured by. The prompt is
read by the Hugging Face model, whose keys and values are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpu_peers import Eager
from gpu_run import captured
from torch import Tensor
from torch.nn import functional as F


class Layer(NamedTuple):
    """Packed weights [out, in] of a layer, its norms, and its caches [1, kv_heads, capacity, d]."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    first_norm: Any
    second_norm: Any
    k: Tensor
    v: Tensor


class Chain(Eager):
    """Decoding of one text; the whole step, choice of the token included, is one CUDA graph where there is a GPU."""

    def __init__(self, model: Any, capacity: int) -> None:
        super().__init__(model)
        config, weight = model.config, model.lm_head.weight
        shape = (1, config.num_key_value_heads, capacity, config.head_dim)
        self.layers = [_layer(layer, weight.new_zeros(shape), weight.new_zeros(shape)) for layer in model.model.layers]
        self.norm, self.head = _norm(model.model.norm), weight
        frequencies = model.model.rotary_emb.inv_freq.double()
        angles = torch.arange(capacity, device=weight.device, dtype=torch.float64)[:, None] * frequencies
        self.angles = torch.cat([angles.cos(), angles.sin()], 1).float()
        self.tickets = torch.zeros(max(config.hidden_size, 4096), dtype=torch.int32, device=weight.device)
        self.position = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
        self.token = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
        self.logits: Tensor = weight.new_zeros(1, len(weight))
        self.replay: Callable[[], None] | None = None

    def compute(self) -> Tensor:
        """The logits [1, vocab] after `token` at `position`."""
        from weft.backends.torch.kernels.decode_attention import decode_attention
        from weft.backends.torch.kernels.linear_residual import linear_residual
        from weft.backends.torch.kernels.norm_glu import norm_glu
        from weft.backends.torch.kernels.norm_linear import norm_linear
        from weft.backends.torch.kernels.norm_qkv import norm_qkv

        position, tickets = self.position, self.tickets
        cos, sin = self.angles.index_select(0, position[0]).chunk(2, 1)
        x = F.embedding(self.token[0], self.model.model.embed_tokens.weight)
        for w in self.layers:
            q = norm_qkv(x, w.qkv, w.k, w.v, position, norm=w.first_norm, cos=cos, sin=sin)
            y = decode_attention(q, w.k, w.v, position, tickets=tickets)
            x = linear_residual(y.view(1, -1), w.out, x, tickets=tickets)
            y = norm_glu(x, w.gate_up, norm=w.second_norm)
            x = linear_residual(y, w.down, x, tickets=tickets)
        logits: Tensor = norm_linear(x, self.head, norm=self.norm)
        return logits

    def advance(self) -> None:
        """One step: logits, the token they choose, and the next position."""
        self.logits.copy_(self.compute())
        self.token.copy_(self.logits.argmax(-1, keepdim=True))
        self.position.add_(1)

    @torch.no_grad()
    def start(self, ids: Tensor) -> None:
        if self.replay is None:
            self.replay = captured([self.advance])
        layers, logits = self.prefilled(ids)
        for mine, (keys, values) in zip(self.layers, layers, strict=True):
            mine.k[:, :, : ids.shape[1]] = keys
            mine.v[:, :, : ids.shape[1]] = values
        self.position.fill_(ids.shape[1])
        self.token.copy_(logits.argmax(-1, keepdim=True))

    @torch.no_grad()
    def step(self) -> Tensor:
        assert self.replay is not None
        self.replay()
        return self.token

    def _logits(self, token: Tensor) -> Tensor:
        self.token.copy_(token)
        self.step()
        return self.logits.clone()


def _norm(norm: Any) -> Any:
    from weft.backends.torch.kernels.shared.norm import Norm

    return Norm("rms", norm.weight, eps=norm.variance_epsilon)


def _layer(layer: Any, k: Tensor, v: Tensor) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
        attention.o_proj.weight,
        torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        mlp.down_proj.weight,
        _norm(layer.input_layernorm),
        _norm(layer.post_attention_layernorm),
        k,
        v,
    )
