"""weft's side of the comparison: generated modules on the weights of a Hugging Face model, and its kernels by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpu_chain import Chain
from gpu_models import Shape, architecture
from gpu_peers import Contender
from gpu_run import captured
from torch import Tensor, nn

if TYPE_CHECKING:
    from weft.ir import Graph

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


def generated(model: Any) -> tuple[Graph, nn.Module]:
    """The graph of the architecture of `model`, and the module that weft writes for it, on the weights of `model`."""
    from weft.backends.targets import TARGETS
    from weft.backends.torch import kernels
    from weft.backends.torch.codegen.source import write_source
    from weft.backends.torch.lower.lower import lower
    from weft.backends.torch.package.module import load, run_source
    from weft.frontends.api.source.sources import load_source
    from weft.passes import run_passes

    graph = load_source(architecture(_shape(model))).graph
    graph = run_passes(graph, TARGETS["torch"].pipeline(graph, "f32"))
    with torch.device("meta"):
        module: nn.Module = run_source(write_source(lower(graph), kernels.__name__).text).Model()
    theirs = model.state_dict()
    load(module, {key: theirs[_theirs(key)] for key in module.state_dict()})
    return graph, module.eval().requires_grad_(False)


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
        self.module: Any
        self.graph, self.module = generated(model)
        self.cache = self.module.new_cache(1, capacity)
        self.token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        self.first = torch.empty(0)

    @torch.no_grad()
    def start(self, ids: Tensor) -> None:
        self.cache.length = 0
        last = torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
        self.first = self.module(ids, cache=self.cache, last=last)[:, -1]
        self.token.copy_(self.first.argmax(-1, keepdim=True))

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Those [1, vocab] after `token`, which from then on is in the cache."""
        found: Tensor = self.module(self.token, cache=self.cache)[:, -1]
        return found

    @torch.no_grad()
    def step(self) -> Tensor:
        self.token.copy_(self.logits().argmax(-1, keepdim=True))
        return self.token

    def forced(self, ids: Tensor, tokens: Tensor) -> Tensor:
        self.start(ids)
        rows = [self.first.float()]
        for i in range(tokens.shape[1] - 1):
            self.token.copy_(tokens[:, i : i + 1])
            rows.append(self.logits().float())
        return torch.cat(rows)


class Step(Module):
    """The generated decode step, its kernels and the choice of the token captured as one CUDA graph."""

    def __init__(self, model: Any, capacity: int) -> None:
        from weft.backends.torch.package.module import build_step

        super().__init__(model, capacity)
        self.run = build_step(self.graph, self.module)
        self.position = torch.zeros_like(self.token)
        self.held: Tensor = model.lm_head.weight.new_zeros(1, len(model.lm_head.weight))
        self.replay: Callable[[], None] | None = None

    def start(self, ids: Tensor) -> None:
        if self.replay is None:
            with torch.no_grad():
                self.replay = captured([self.advance])
        super().start(ids)
        self.position.fill_(ids.shape[1])

    def advance(self) -> None:
        self.held.copy_(self.run(self.token, self.position, self.cache)[:, -1])
        self.token.copy_(self.held.argmax(-1, keepdim=True))
        self.position.add_(1)

    @torch.no_grad()
    def logits(self) -> Tensor:
        self.step()
        return self.held.clone()

    @torch.no_grad()
    def step(self) -> Tensor:
        assert self.replay is not None
        self.replay()
        return self.token


class Runtime(Module):
    """weft's runtime: the step captured by it, and every token drawn on the device and given to the host."""

    def __init__(self, model: Any, capacity: int) -> None:
        from weft.backends.runtime.core.sampling import Sampler, Sampling
        from weft.backends.runtime.torch.decoder import TorchContext, TorchDecoder
        from weft.backends.torch.package.module import build_step

        super().__init__(model, capacity)
        vocab = len(model.lm_head.weight)
        decoder = TorchDecoder(
            self.module, vocab=vocab, max_length=capacity, step=build_step(self.graph, self.module), draws=True
        )
        self.cache = None
        self.context = TorchContext(decoder, 1, capacity)
        self.sampler = Sampler(Sampling(), ())
        self.draw: Any = None

    def start(self, ids: Tensor) -> None:
        scores = self.context.prefill(ids.tolist(), chunk=ids.shape[1])
        self.first = torch.from_numpy(scores.copy())
        self.token = self.first.argmax(-1, keepdim=True)
        self.draw = self.context.drawing([self.sampler])

    def step(self) -> Tensor:
        drawn = self.draw(self.token[:, 0].numpy(), np.ones(1, bool))
        self.token = torch.from_numpy(drawn)[:, None]
        return self.token

    def logits(self) -> Tensor:
        return torch.from_numpy(self.context.step(self.token[:, 0].numpy()).copy())

    def forced(self, ids: Tensor, tokens: Tensor) -> Tensor:
        return super().forced(ids, tokens).to(tokens.device)


OURS: dict[str, Callable[[Any, int], Contender]] = {
    "weft_step": Step,
    "weft_runtime": Runtime,
    "weft_kernels": Chain,
    "weft_module": Module,
}


def ours(name: str, model: Any, capacity: int) -> Contender:
    """A decoder of ours by name, with room for `capacity` tokens."""
    return OURS[name](model, capacity)


def prefill(model: Any, rows: int) -> Callable[[Tensor], Tensor]:
    """A prompt of `rows` tokens into an empty cache, and the logits of the last token."""
    module: Any = generated(model)[1]
    last = torch.tensor([rows - 1], device=model.device)

    def read(ids: Tensor) -> Tensor:
        logits: Tensor = module(ids, cache=module.new_cache(1, rows), last=last)
        return logits

    return read
