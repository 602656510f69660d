"""Hugging Face decoders as their users would run them, behind one small interface: `start` reads a prompt, `step` makes
a token, on the device and without waiting for it.

All choose tokens on the device by argmax. Prompts are read by the model as it is, once for each prompt; a start copies
what that put into the cache, so that rounds of a long context do not wait for it. Experts of one text are computed as
transformers' `generate` does, those of several texts in groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from gpu_clock import captured
from gpu_models import Shape, hugging_face, with_int4
from torch import Tensor

begin_step: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin


class Contender(Protocol):
    """What decodes: ids and tokens are [batch, n] and [batch, 1]."""

    def start(self, ids: Tensor) -> None:
        """Read the prompt and choose the first token."""

    def step(self) -> Tensor:
        """The next token."""

    def forced(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Logits [n, vocab] in f32 after the prompt [1, p] and after each of `tokens` [1, n] but the last."""


class Eager:
    """transformers as it is: SDPA and a cache that grows by concatenation."""

    def __init__(self, model: Any, batch: int = 1) -> None:
        self.model = model
        self.experts = "batched_mm" if batch == 1 else "grouped_mm"  # the first copies the weights of what tokens ask
        self.known: dict[tuple[int, int, int], tuple[list[tuple[Tensor, Tensor]], Tensor]] = {}
        self.cache: Any = None
        self.token = torch.empty(0)

    def prefilled(self, ids: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Keys and values of every layer, and the logits [batch, vocab] after the prompt."""
        from transformers import DynamicCache

        key = (ids.data_ptr(), *ids.shape)
        if key not in self.known:
            cache: Any = DynamicCache(config=self.model.config)
            mixture = hasattr(self.model.config, "num_experts")
            if mixture:
                self.model.set_experts_implementation("grouped_mm")
            logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            if mixture:
                self.model.set_experts_implementation(self.experts)
            self.known = {key: ([(layer.keys, layer.values) for layer in cache.layers], logits[:, -1])}
        return self.known[key]

    @torch.no_grad()
    def start(self, ids: Tensor) -> None:
        from transformers import DynamicCache

        layers, logits = self.prefilled(ids)
        self.cache = DynamicCache(config=self.model.config)
        for i, (keys, values) in enumerate(layers):
            self.cache.update(keys, values, i)
        self.token = logits.argmax(-1, keepdim=True)

    @torch.no_grad()
    def step(self) -> Tensor:
        self.token = self._logits(self.token).argmax(-1, keepdim=True)
        return self.token

    @torch.no_grad()
    def forced(self, ids: Tensor, tokens: Tensor) -> Tensor:
        self.start(ids)
        rows = [self.prefilled(ids)[1], *(self._logits(tokens[:, i : i + 1]) for i in range(tokens.shape[1] - 1))]
        return torch.cat([row.float() for row in rows])

    def _logits(self, token: Tensor) -> Tensor:
        logits: Tensor = self.model(token, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        return logits


class Static(Eager):
    """transformers with its static cache of `capacity` tokens; `mode` says how a step is run.

    "reduce-overhead" and "max-autotune" are torch.compile's; "graph" captures what would run uncompiled, so that the
    host costs nothing; "eager" launches it kernel by kernel.
    """

    def __init__(self, model: Any, capacity: int, mode: str, batch: int = 1) -> None:
        super().__init__(model, batch)
        from transformers import StaticCache

        self.cache = StaticCache(config=model.config, max_cache_len=capacity)
        self.mode = mode
        self.position = torch.empty(0)
        self.replay: Callable[[], None] | None = None
        self.run: Any = self._logits_at
        if mode not in ("eager", "graph"):
            torch._dynamo.reset()
            self.run = torch.compile(self._logits_at, mode=mode, fullgraph=True, dynamic=False)

    def _logits_at(self, token: Tensor, position: Tensor) -> Tensor:
        logits: Tensor = self.model(
            token, position_ids=position, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        return logits

    @torch.no_grad()
    def start(self, ids: Tensor) -> None:
        layers, logits = self.prefilled(ids)
        self._fill(ids, layers)
        first = logits.argmax(-1, keepdim=True)
        if self.mode != "graph":
            self.token = first
            return
        if self.replay is None:
            self.token = first.clone()
            self.replay = captured([self._advance])
            self._fill(ids, layers)
        self.token.copy_(first)

    def _fill(self, ids: Tensor, layers: list[tuple[Tensor, Tensor]]) -> None:
        """The cache as the prompt leaves it, and the position after it; their tensors stay where they are."""
        self.cache.reset()
        for i, (keys, values) in enumerate(layers):
            self.cache.update(keys, values, i)
        if not self.position.numel():
            self.position = torch.zeros(ids.shape[0], 1, dtype=torch.long, device=ids.device)
        self.position.fill_(ids.shape[1])

    def _advance(self) -> None:
        self.token.copy_(self._logits_at(self.token, self.position).argmax(-1, keepdim=True))
        self.position.add_(1)

    @torch.no_grad()
    def step(self) -> Tensor:
        if self.replay is not None:
            self.replay()
        else:
            self.token = self._logits(self.token).argmax(-1, keepdim=True)
        return self.token

    def _logits(self, token: Tensor) -> Tensor:
        begin_step()
        logits: Tensor = self.run(token, self.position).clone()
        self.position.add_(1)
        return logits


PEERS = {"hf_eager": "", "hf_static_graph": "graph", "hf_static_compiled": "reduce-overhead"}
AUTOTUNED = {"hf_static_autotuned": "max-autotune"}  # minutes of compilation


def peer(name: str, shape: Shape, device: str, batch: int, capacity: int, model: Any = None) -> Contender:
    """A peer by name, with room for `capacity` tokens of each text, on weights of its own or those of `model`."""
    if model is None:
        model = hugging_face(shape, device, torch.bfloat16)
        if shape.bits == 4:
            with_int4(model)
    mode = (PEERS | AUTOTUNED)[name]
    return Static(model, capacity, mode, batch) if mode else Eager(model, batch)
