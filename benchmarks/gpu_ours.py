"""weft's side of the comparison: generated modules on the weights of a Hugging Face model, and its kernels by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_chain import Chain
from gpu_models import Shape, architecture
from gpu_peers import Contender
from torch import Tensor, nn

NAMES = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn": "self_attn",
    "ffn": "mlp",
    **{name: f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")},
}


def generated(model: Any) -> nn.Module:
    """The module that weft writes for the architecture of `model`, which shares its weights with it."""
    from weft.backends.torch.module import load, run_source
    from weft.backends.torch.source import write_source
    from weft.frontends.sources import load_source
    from weft.passes import run_passes

    graph = run_passes(load_source(architecture(_shape(model))).graph, "default")
    with torch.device("meta"):
        module: nn.Module = run_source(write_source(graph).text).Model()
    theirs = model.state_dict()
    load(module, {key: theirs[_theirs(key)] for key in module.state_dict()})
    return module.eval().requires_grad_(False)


def _theirs(key: str) -> str:
    """transformers' name of a parameter that weft calls `key`."""
    name = ".".join(NAMES.get(part, part) for part in key.split("."))
    return f"model.{name}" if name.startswith("layers.") else name


def _shape(model: Any) -> Shape:
    config = model.config
    return Shape(
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
        config.tie_word_embeddings,
        config.rope_parameters["factor"],
        config.max_position_embeddings,
    )


class Module:
    """The generated module as it is, call by call with its cache of `capacity` tokens."""

    def __init__(self, model: Any, capacity: int) -> None:
        self.module: Any = generated(model)
        self.capacity = capacity
        self.cache: Any = None
        self.token = torch.empty(0)

    @torch.no_grad()
    def _logits(self, ids: Tensor) -> Tensor:
        last = torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
        logits: Tensor = self.module(ids, cache=self.cache, last=last)[:, 0]
        return logits

    def start(self, ids: Tensor) -> None:
        self.cache = self.module.new_cache(len(ids), self.capacity)
        self.first = self._logits(ids)
        self.token = self.first.argmax(-1, keepdim=True)

    def step(self) -> Tensor:
        self.token = self._logits(self.token).argmax(-1, keepdim=True)
        return self.token

    def forced(self, ids: Tensor, tokens: Tensor) -> Tensor:
        self.start(ids)
        rows = [self.first, *(self._logits(tokens[:, i : i + 1]) for i in range(tokens.shape[1] - 1))]
        return torch.cat([row.float() for row in rows])


OURS: dict[str, Callable[[Any, int], Contender]] = {"weft_kernels": Chain, "weft_module": Module}


def ours(name: str, model: Any, capacity: int) -> Contender:
    """A decoder of ours by name, with room for `capacity` tokens."""
    return OURS[name](model, capacity)


def prefill(model: Any, rows: int) -> Callable[[Tensor], object]:
    """A prompt into an empty cache, and the logits of the last token."""
    module = Module(model, rows)
    return module.start
