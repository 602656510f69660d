"""The shapes that are measured, as Hugging Face models with random weights on the device and in weft's language."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from weft.backends.torch.kernels.shared.float8 import rounded

from .limits import captured

if TYPE_CHECKING:
    from weft.ir import Graph

FLOATS = 128  # weights in FP8 that share a scale of 32 bits
GROUP = 32  # weights of 4 bits that share a scale of 16 bits, as in GGUF's Q4_0 and in gpt-fast


@dataclass(frozen=True)
class Shape:
    """A Llama by its sizes; with `experts` a Qwen3-MoE, whose tokens ask `choices` of them, each of width `hidden`.

    With `bits` 4 its products read codes of 4 bits, with 8 floats of 8 bits, those of the head included; with 8 its
    caches hold such floats, too.
    """

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    tied: bool
    factor: float = 1.0  # of the rope scaling of Llama 3.1
    context: int = 131_072
    head_dim: int = 128
    experts: int = 0
    choices: int = 0
    bits: int = 16

    def products(self) -> dict[str, tuple[int, int]]:
        """[out, in] of each matrix of a layer that has one feed-forward."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.dim),
            "out": (self.dim, q),
            "gate_up": (2 * self.hidden, self.dim),
            "down": (self.dim, self.hidden),
        }

    def step_bytes(self, length: int, batch: int = 1) -> int:
        """Bytes that a decoding step of `batch` texts of `length` tokens reads: weights, the head, keys and values.

        Of experts it reads those that some text asks, if each asks any with the same probability.
        """
        qkv, out, gate_up, down = (outs * ins for outs, ins in self.products().values())
        asked = self.experts * (1 - (1 - self.choices / self.experts) ** batch) if self.experts else 1
        matrices = self.layers * (qkv + out + asked * (gate_up + down)) + self.vocab * self.dim
        others = self.layers * (2 + self.experts) * self.dim + self.dim  # norms and routers
        cache = batch * length * self.layers * 2 * self.kv_heads * self.head_dim
        scales = {4: 2 / GROUP, 8: 4 / FLOATS}.get(self.bits, 0)
        return int(matrices * (self.bits / 8 + scales) + 2 * others + (1 if self.bits == 8 else 2) * cache)

    def gib(self) -> float:
        """Memory of the weights in bf16."""
        qkv, out, gate_up, down = (outs * ins for outs, ins in self.products().values())
        layer = qkv + out + max(self.experts, 1) * (gate_up + down)
        return 2 * (self.layers * layer + (2 - self.tied) * self.vocab * self.dim) / 2**30


LLAMA_8B = Shape(128_256, 4096, 32, 32, 8, 14_336, tied=False, factor=8.0)
LLAMA_1B = Shape(128_256, 2048, 16, 32, 8, 8192, tied=True, factor=32.0, head_dim=64)
LLAMA_3B = Shape(128_256, 3072, 28, 24, 8, 8192, tied=True, factor=32.0)
TINY = Shape(512, 128, 2, 4, 2, 256, tied=True, factor=32.0, context=4096, head_dim=32)
SHAPES = {"llama3.1-8b": LLAMA_8B, "llama3.2-3b": LLAMA_3B, "llama3.2-1b": LLAMA_1B, "tiny": TINY}
FP8_8B = Shape(128_256, 4096, 32, 32, 8, 14_336, tied=False, factor=8.0, bits=8)
INT4_8B = Shape(128_256, 4096, 32, 32, 8, 14_336, tied=False, factor=8.0, bits=4)
QWEN3_MOE = Shape(151_936, 2048, 16, 32, 4, 768, tied=False, experts=128, choices=8)  # 16 of the 48 layers of 30B-A3B
DECODERS = {"8b": LLAMA_8B, "1b": LLAMA_1B, "8b_int4": INT4_8B, "8b_fp8": FP8_8B, "moe": QWEN3_MOE}
TINY_DECODERS = {
    "tiny": TINY,
    "tiny_int4": Shape(512, 128, 2, 4, 2, 256, tied=False, factor=32.0, head_dim=32, bits=4),
    "tiny_fp8": Shape(512, 128, 2, 4, 2, 256, tied=False, factor=32.0, head_dim=32, bits=8),
    "tiny_moe": Shape(512, 128, 2, 4, 2, 64, tied=False, head_dim=32, experts=8, choices=2),
}


def hugging_face(shape: Shape, device: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """A LlamaForCausalLM or Qwen3MoeForCausalLM of this shape, its weights drawn on the device by `randomize`."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    factory: Any = AutoModelForCausalLM
    sizes = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.hidden,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if shape.experts:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
        experts = {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.choices,
            "moe_intermediate_size": shape.hidden,
            "norm_topk_prob": True,
        }
        config: Any = Qwen3MoeConfig(**sizes, **experts, rms_norm_eps=1e-6, rope_parameters=rope)
    else:
        scaling = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": shape.factor, **scaling}
        config = LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_parameters=rope)
    with torch.device(device):
        model = factory.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    for number, (name, value) in enumerate(model.named_parameters()):
        randomize(value, name, 1000 * seed + number)
    return model.requires_grad_(False)


@torch.no_grad()
def randomize(value: Tensor, name: str, seed: int, floats: bool = False) -> None:
    """Normal weights of variance 1 / fan-in, so that activations keep their size; logits of standard deviation 3.

    With these the next token is neither certain nor a toss of dice, and layers, not the embedding, decide it. Drawn as
    f32 and rounded once, so that a seed means the same numbers in every dtype but for that rounding. Codes are any, or
    `floats` of 8 bits.
    """
    generator = torch.Generator(value.device).manual_seed(seed)
    if name.endswith("codes") and floats:
        drawn = torch.randn(len(value), 4 * value.shape[1], generator=generator, device=value.device).mul_(64)
        value.copy_(rounded(drawn).view(torch.int32))
        return
    if not value.is_floating_point():
        value.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
        return
    if name.endswith(("k_scale", "v_scale")):
        drawn = torch.ones(value.shape, device=value.device)
    elif name.endswith("scales") and floats:  # [in / FLOATS, out], of floats of standard deviation 64
        scale = (FLOATS * value.shape[0]) ** -0.5 / 64
        drawn = torch.rand(value.shape, generator=generator, device=value.device).mul_(0.4 * scale).add_(0.8 * scale)
    elif value.ndim < 2:
        drawn = 1 + 0.1 * torch.randn(value.shape, generator=generator, device=value.device)
    elif name.endswith("scales"):  # [in / GROUP, out], of codes from −8 to 7
        scale = (GROUP * value.shape[0]) ** -0.5 * 12**0.5 / 16
        drawn = torch.rand(value.shape, generator=generator, device=value.device).mul_(0.4 * scale).add_(0.8 * scale)
    else:
        scale = (3 if "embed" in name or "lm_head" in name else 1) / value.shape[-1] ** 0.5
        drawn = torch.randn(value.shape, generator=generator, device=value.device).mul_(scale)
    value.copy_(drawn)


def architecture(shape: Shape) -> Any:
    """The same model in weft's language."""
    from weft.frontends.dsl import Attention, Block, Decoder, GatedMLP, MoE, RMSNorm
    from weft.frontends.dsl import RoPE as Rope

    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    if shape.experts:
        attention = Attention(**heads, rope=Rope(1e6), qk_norm=RMSNorm(1e-6))
        block = Block(attention, MoE(shape.experts, shape.hidden, shape.choices), RMSNorm(1e-6))
    else:
        rope = Rope(500_000, scaling="llama3", factor=shape.factor, original=8192, low_freq=1, high_freq=4)
        block = Block(Attention(**heads, rope=rope), GatedMLP(shape.hidden), RMSNorm(1e-5))
    return Decoder(shape.vocab, shape.dim, shape.layers, block, tie_embeddings=shape.tied, context=shape.context)


def with_int4(model: nn.Module) -> None:
    """Replace the linear layers of `model` by torch's product with weights of 4 bits, as gpt-fast does."""
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(parent, name, Int4Linear(layer.in_features, layer.out_features, layer.weight.device))


class Int4Linear(nn.Module):
    """x Wᵀ, x [..., in] in bf16, by `_weight_int4pack_mm` on random codes of 4 bits and a scale and zero a GROUP."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
        scales = torch.full((inputs // GROUP, outputs, 2), inputs**-0.5 * 12**0.5 / 16, device=device)
        scales[..., 1] = 0
        self.register_buffer("tiles", torch.ops.aten._convert_weight_to_int4pack(codes, 8))
        self.register_buffer("scales", scales.bfloat16())
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm(x.flatten(0, -2), self.tiles, GROUP, self.scales)
        return y.view(*x.shape[:-1], self.outputs)


def prompt(shape: Shape, batch: int, length: int, device: str, seed: int = 0) -> torch.Tensor:
    """Random tokens [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, shape.vocab, (batch, length), generator=generator).to(device)


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
    from weft.backends.targets import TARGETS
    from weft.backends.torch import kernels
    from weft.backends.torch.codegen.source import write_source
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
