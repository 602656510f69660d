"""Softmax attention as `attn_implementation="eager"` computes it, and in modules that attend more than once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def eager_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return softmax(scaling · q kᵀ + mask) v of q [batch, heads, seq, width] and k, v [batch, kv_heads, n, width], as
    [batch, seq, heads, width]; and the softmax [batch, heads, seq, n]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * scaling
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    return (weights @ v).transpose(1, 2), weights


def eager_scored_attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Return softmax(scores + mask) v of q [batch, heads, seq, width] and k, v [batch, kv_heads, n, width], as [batch,
    seq, heads, width]; and the softmax [batch, heads, seq, n].

    Scores s = scaling · q kᵀ become softcap · tanh(s / softcap); `position_bias` [1, heads, seq, n] is added; `s_aux`
    [heads] are scores of one more key for each head, whose value is 0.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT * scaling).float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None:
        scores = scores + mask
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v).transpose(1, 2), weights


class SoftmaxAttention(nn.Module):
    """Softmax attention with a cache number of its own, for modules with several attentions."""

    def __init__(
        self, config: Any, layer_idx: int | None, num_key_value_groups: int, scaling: float, is_causal: bool = True
    ) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, is_causal
        self.num_key_value_groups, self.scaling = num_key_value_groups, scaling

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        past_key_values: Cache | None = None,
        layer_idx: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attention [batch, seq, heads · width] by the config's implementation, also over cached keys and
        values; the cache stores k and v under `layer_idx` (None: that of the module)."""
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx if layer_idx is None else layer_idx, kwargs=kwargs)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_scored_attention)
        x: Tensor = attend(self, q, k, v, mask, scaling=self.scaling, **kwargs)[0]
        return x.reshape(q.shape[0], q.shape[2], -1)


def key_distances(x: Tensor, past_key_values: Cache | None = None) -> Tensor:
    """Return distances j − i [1, seq, n] from new tokens i of x [batch, seq, ...] to keys j of a full KV cache."""
    past, (keys, first) = 0, (x.shape[1], 0)
    if past_key_values is not None:
        sliding, linear = past_key_values.is_sliding, past_key_values.is_linear
        dummy = getattr(past_key_values, "is_dummy", linear)  # from transformers 5.21 on
        kinds = enumerate(zip(sliding, linear, dummy, strict=True))
        layer_idx = next((i for i, other in kinds if not any(other)), 0)
        past = past_key_values.get_seq_length(layer_idx)
        keys, first = past_key_values.get_mask_sizes(x.shape[1], layer_idx)
    queries = torch.arange(x.shape[1], device=x.device) + past
    return (torch.arange(keys, device=x.device) + first - queries[:, None])[None]
