"""weft's side of the comparison: generated modules, their decode steps and the runtime around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpu_clock import captured
from gpu_models import Shape, architecture, randomize
from gpu_peers import Contender
from torch import Tensor, nn

from weft.backends.torch.kernels.choose_tokens import TICKETS, choose_tokens
from weft.backends.torch.kernels.shared.tickets import Tickets

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


@dataclass(frozen=True)
class Codes:
    """A reader of weights that are stored in blocks of `kind`: what they are, not the numbers, which are drawn."""

    shapes: dict[str, tuple[int, ...]]
    kind: Any
    path: Path = Path("codes")

    def keys(self) -> Any:
        return self.shapes

    def shape(self, key: str) -> tuple[int, ...]:
        return self.shapes[key]

    def dtype(self, _: str) -> Any:
        return self.kind

    def read(self, *_: Any) -> Any:
        raise TypeError("these weights are drawn where they are used")

    read_blocks = read


def generated(
    shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16, model: Any = None
) -> tuple[dict[str, Graph], Any]:
    """The forms of this shape and the module that weft writes for it: with random weights, or with those of `model`."""
    from weft.backends.target import TARGETS
    from weft.backends.torch import kernels
    from weft.backends.torch.codegen.model_source import write_source
    from weft.backends.torch.lower.lower import lower
    from weft.backends.torch.package.module import load, run_source
    from weft.frontends.app.api.modules import step_forms
    from weft.frontends.app.api.source.sources import load_source
    from weft.passes import run_passes

    graph = load_source(architecture(shape)).graph
    graph = run_passes(graph, TARGETS["torch"].pipeline(graph, "f32"))
    if shape.bits < 16:
        _store_codes(graph, shape.bits)
    forms = step_forms(graph)
    with torch.device("meta"):
        source = write_source(lower(forms["model"], shape.bits == 8), kernels.__name__)
        module: nn.Module = run_source(source.text).Model()
    theirs = {} if model is None else model.state_dict()
    weights = {}
    for number, (key, value) in enumerate(module.state_dict().items()):
        if model is None:
            whole = value.dtype in (torch.int32, torch.float16) or "scale" in key  # codes and scales keep their dtype
            weights[key] = torch.empty(value.shape, dtype=value.dtype if whole else dtype, device=device)
            randomize(weights[key], key, number, floats=shape.bits == 8)
        else:
            weights[key] = _theirs(theirs, key)
    load(module, weights)
    return forms, module.eval().requires_grad_(False)


def _store_codes(graph: Graph, bits: int) -> None:
    """Let all linear maps of the graph have weights that a checkpoint stores in blocks of 4 bits, to be kept so; or in
    floats of 8."""
    from weft.ir import ops
    from weft.ir.graph import Param
    from weft.ir.recipes.combinators import Source
    from weft.ir.types import dtypes
    from weft.passes import Trace
    from weft.passes.library.target.keep_blocks import KeepBlocks

    weights = {w.name: w for node in graph.nodes if node.op is ops.linear and isinstance(w := node.inputs[1], Param)}
    for name, weight in weights.items():
        weight.recipe = Source(name)
    kind = dtypes.q4_0 if bits == 4 else dtypes.f8e4m3_128
    graph.reader = Codes({name: weight.type.concrete({}) for name, weight in weights.items()}, kind)
    KeepBlocks("all").run(graph, Trace())


def _theirs(weights: dict[str, Tensor], key: str) -> Tensor:
    """The weight of transformers' model that weft calls `key`; gates and ups of experts are halves of one there."""
    layer, _, expert = key.partition(".experts.")
    if expert:
        part = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}[expert]
        whole = weights[f"model.{layer.replace('ffn', 'mlp')}.experts.{part}"]
        return whole if expert == "down" else whole.chunk(2, 1)[expert == "up"]
    name = ".".join(NAMES.get(part, part) for part in key.split(".")).replace("mlp.router", "mlp.gate")
    return weights[f"model.{name}" if name.startswith("layers.") else name]


class Module:
    """The generated module as it is, call by call with its cache of `capacity` tokens for each text of a batch."""

    def __init__(self, shape: Shape, device: str, batch: int, capacity: int, model: Any = None) -> None:
        self.forms, self.module = generated(shape, device, model=model)
        self.vocab, self.device = shape.vocab, device
        self.cache = self.module.new_cache(batch, capacity)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.first = torch.empty(0)  # logits after the prompt
        self.known: Tensor | None = None  # the prompt that is in the cache

    @torch.no_grad()
    def start(self, ids: Tensor) -> None:
        if self.known is not ids:  # else its keys and values are still there
            self.cache.length = 0
            last = torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
            self.first, self.known = self.module(ids, cache=self.cache, last=last)[:, -1], ids
        self.cache.length = ids.shape[1]
        self.token.copy_(self.first.argmax(-1, keepdim=True))

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Those [batch, vocab] after `token`, which from then on is in the cache."""
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

    def __init__(self, shape: Shape, device: str, batch: int, capacity: int, model: Any = None) -> None:
        from weft.backends.torch.package.module import build_step

        super().__init__(shape, device, batch, capacity, model)
        self.run = build_step(self.forms, self.module, float8_caches=shape.bits == 8)
        self.position = torch.zeros_like(self.token)
        self.active = torch.ones_like(self.token, dtype=torch.bool)
        self.tickets = Tickets(TICKETS)
        self.held = torch.empty(0)
        self.replay: Callable[[], None] | None = None

    def start(self, ids: Tensor) -> None:
        if self.replay is None:
            with torch.no_grad():
                self.replay = captured([self.advance])
        super().start(ids)
        self.position.fill_(ids.shape[1])

    def advance(self) -> None:
        self.held = self.run(self.token, self.position, self.cache)[:, -1]  # a replay writes it where the capture did
        begun = (self.token, self.position, self.active)
        choose_tokens(self.held, begun=begun, tickets=self.tickets(self.held))

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

    def __init__(self, shape: Shape, device: str, batch: int, capacity: int, model: Any = None) -> None:
        from weft.backends.runtime.core.sampler import Sampler, Sampling
        from weft.backends.runtime.torch.torch_decoder import TorchContext, TorchDecoder
        from weft.backends.torch.package.module import build_step
        from weft.backends.torch.package.shipped.load import Stepper

        super().__init__(shape, device, batch, capacity, model)
        one = build_step(self.forms, self.module, float8_caches=shape.bits == 8)
        step = Stepper(self.module, one, most=batch)  # as a folder has it
        decoder = TorchDecoder(self.module, vocab=self.vocab, max_length=capacity, step=step, draws=True)
        self.cache = None
        self.context = TorchContext(decoder, batch, capacity)
        self.samplers = [Sampler(Sampling(), ()) for _ in range(batch)]
        self.draw: Any = None

    def start(self, ids: Tensor) -> None:
        scores = self.context.prefill(ids.tolist(), chunk=ids.shape[1])
        self.first = torch.from_numpy(scores.copy())
        self.token = self.first.argmax(-1, keepdim=True)
        self.draw = self.context.drawing(self.samplers)

    def step(self) -> Tensor:
        drawn = self.draw(self.token[:, 0].numpy(), np.ones(len(self.token), bool))
        self.token = torch.from_numpy(drawn)[:, None]
        return self.token

    def logits(self) -> Tensor:
        return torch.from_numpy(self.context.step(self.token[:, 0].numpy()).copy())

    def forced(self, ids: Tensor, tokens: Tensor) -> Tensor:
        return super().forced(ids, tokens).to(tokens.device)


OURS: dict[str, Callable[..., Contender]] = {"weft_step": Step, "weft_runtime": Runtime, "weft_module": Module}


def prefill(shape: Shape, device: str, rows: int, by_step: bool = True) -> Callable[[Tensor], Tensor]:
    """A prompt of `rows` tokens into an empty cache, and the logits of the last token: by the decode step, as the
    runtime reads it, or by the module."""
    from weft.backends.torch.package.module import build_step

    forms, module = generated(shape, device)
    step = build_step(forms, module, float8_caches=shape.bits == 8) if by_step else None
    last, positions = torch.tensor([rows - 1], device=device), torch.arange(rows, device=device)[None]

    def read(ids: Tensor) -> Tensor:
        cache = module.new_cache(1, rows)
        logits: Tensor = step(ids, positions, cache, last) if step else module(ids, cache=cache, last=last)
        return logits

    return read
