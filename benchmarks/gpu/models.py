"""Models with random weights, by transformers and by weft, and transformers' decoders as their users run them.

All decoders choose tokens by argmax on the device. transformers' read each prompt once, without compilation; `start`
copies its keys and values into the cache, so that rounds after a long prompt do not wait for it. Experts are computed
as by transformers' `generate`: batched for one sequence, grouped for several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weft.backends.torch.kernels.shared.float8 import to_float8

from .limits import capture

if TYPE_CHECKING:
    from weft.ir import Graph

FLOATS = 128  # FP8 weights that share a scale of 32 bits
GROUP = 32  # weights of 4 bits that share a scale of 16 bits, as in GGUF's Q4_0 and in gpt-fast
NAMES = {  # of transformers, by the part's name in weft
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
class Shape:
    """Sizes of a Llama; with `experts`, of a Qwen3-MoE that routes each token to `choices` experts of width `hidden`.

    With `bits` 4 all linear layers have weights in codes of 4 bits; with 8 their weights and the KV cache are FP8.
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
        """Return [out, in] of each matrix of a layer, of one expert if there are several."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.dim),
            "out": (self.dim, q),
            "gate_up": (2 * self.hidden, self.dim),
            "down": (self.dim, self.hidden),
        }

    def step_bytes(self, length: int, batch: int = 1) -> int:
        """Return the bytes that a decode step of `batch` sequences of `length` tokens reads: weights and KV cache.

        Of the experts, count the expected number of distinct ones under uniform routing.
        """
        routed = self.experts * (1 - (1 - self.choices / self.experts) ** batch) if self.experts else 1
        matrices = self.layers * self._layer_elements(routed) + self.vocab * self.dim
        others = self.layers * (2 + self.experts) * self.dim + self.dim  # norms and routers
        cache = batch * length * self.layers * 2 * self.kv_heads * self.head_dim
        scales = {4: 2 / GROUP, 8: 4 / FLOATS}.get(self.bits, 0)
        return int(matrices * (self.bits / 8 + scales) + 2 * others + (1 if self.bits == 8 else 2) * cache)

    def gib(self) -> float:
        """Return the memory of the weights in bf16."""
        layers = self.layers * self._layer_elements(max(self.experts, 1))
        return 2 * (layers + (2 - self.tied) * self.vocab * self.dim) / 2**30

    def _layer_elements(self, experts: float) -> float:
        qkv, out, gate_up, down = (outs * ins for outs, ins in self.products().values())
        return qkv + out + experts * (gate_up + down)


LLAMA_8B = Shape(128_256, 4096, 32, 32, 8, 14_336, tied=False, factor=8.0)
LLAMA_1B = Shape(128_256, 2048, 16, 32, 8, 8192, tied=True, factor=32.0, head_dim=64)
LLAMA_3B = Shape(128_256, 3072, 28, 24, 8, 8192, tied=True, factor=32.0)
TINY = Shape(512, 128, 2, 4, 2, 256, tied=True, factor=32.0, context=4096, head_dim=32)
SHAPES = {"llama3.1-8b": LLAMA_8B, "llama3.2-3b": LLAMA_3B, "llama3.2-1b": LLAMA_1B, "tiny": TINY}
INT4_8B, FP8_8B = replace(LLAMA_8B, bits=4), replace(LLAMA_8B, bits=8)
QWEN3_MOE = Shape(151_936, 2048, 16, 32, 4, 768, tied=False, experts=128, choices=8)  # 16 of the 48 layers of 30B-A3B
DECODERS = {"8b": LLAMA_8B, "1b": LLAMA_1B, "8b_int4": INT4_8B, "8b_fp8": FP8_8B, "moe": QWEN3_MOE}
TINY_DECODERS = {
    "tiny": TINY,
    "tiny_int4": replace(TINY, tied=False, bits=4),
    "tiny_fp8": replace(TINY, tied=False, bits=8),
    "tiny_moe": replace(TINY, tied=False, hidden=64, experts=8, choices=2),
}


def prompt(shape: Shape, batch: int, length: int, device: str) -> Tensor:
    """Draw random tokens [batch, length]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, shape.vocab, (batch, length), generator=generator).to(device)


def hugging_face(shape: Shape, device: str) -> Any:
    """Build a LlamaForCausalLM or Qwen3MoeForCausalLM in bf16 with weights drawn on the device by `randomize`."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

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
        experts = {"num_experts": shape.experts, "num_experts_per_tok": shape.choices, "norm_topk_prob": True}
        sizes["moe_intermediate_size"] = shape.hidden
        config: Any = Qwen3MoeConfig(**sizes, **experts, rms_norm_eps=1e-6, rope_parameters=rope)
    else:
        scaling = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": shape.factor, **scaling}
        config = LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_parameters=rope)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    for number, (name, value) in enumerate(model.named_parameters()):
        randomize(value, name, number)
    return model.requires_grad_(False)


@torch.no_grad()
def randomize(value: Tensor, name: str, seed: int, floats: bool = False) -> None:
    """Draw normal weights of variance 1 / fan-in, so that activations keep their size; logits have deviation 3.

    The next token is then neither certain nor random, and depends on the layers more than on the embedding. Weights are
    drawn in f32 and rounded once: a seed yields the same values in every dtype, up to rounding. Codes are uniform, or
    `floats` of 8 bits.
    """
    generator = torch.Generator(value.device).manual_seed(seed)
    if name.endswith("codes") and floats:
        drawn = torch.randn(len(value), 4 * value.shape[1], generator=generator, device=value.device).mul_(64)
        value.copy_(to_float8(drawn).view(torch.int32))
        return
    if not value.is_floating_point():
        value.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
        return
    if name.endswith(("k_scale", "v_scale")):
        drawn = torch.ones(value.shape, device=value.device)
    elif name.endswith("scales") and (floats or value.ndim > 1):  # [in / group, out]
        floats_scale = (FLOATS * value.shape[0]) ** -0.5 / 64  # of floats of standard deviation 64
        scale = floats_scale if floats else (GROUP * value.shape[0]) ** -0.5 * 12**0.5 / 16  # of codes from −8 to 7
        drawn = torch.rand(value.shape, generator=generator, device=value.device).mul_(0.4 * scale).add_(0.8 * scale)
    elif value.ndim < 2:
        drawn = 1 + 0.1 * torch.randn(value.shape, generator=generator, device=value.device)
    else:
        scale = (3 if "embed" in name or "lm_head" in name else 1) / value.shape[-1] ** 0.5
        drawn = torch.randn(value.shape, generator=generator, device=value.device).mul_(scale)
    value.copy_(drawn)


def use_int4(model: nn.Module) -> None:
    """Replace the linear layers of `model` by torch's product with weights of 4 bits, like gpt-fast."""
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(parent, name, Int4Linear(layer.in_features, layer.out_features, layer.weight.device))


class Int4Linear(nn.Module):
    """Compute x Wᵀ for x [..., in] in bf16 by `_weight_int4pack_mm` on random codes, scale and zero per GROUP."""

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


def architecture(shape: Shape) -> Any:
    """Return the model of this shape in weft's language."""
    from weft.frontends.dsl import Attention, Block, Decoder, GatedMLP, MoE, RMSNorm
    from weft.frontends.dsl import RoPE as Rope

    heads: dict[str, Any] = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    if shape.experts:
        attention = Attention(**heads, rope=Rope(1e6), qk_norm=RMSNorm(1e-6))
        block = Block(attention, MoE(shape.experts, shape.hidden, shape.choices), RMSNorm(1e-6))
    else:
        rope = Rope(500_000, scaling="llama3", factor=shape.factor, original=8192, low_freq=1, high_freq=4)
        block = Block(Attention(**heads, rope=rope), GatedMLP(shape.hidden), RMSNorm(1e-5))
    return Decoder(shape.vocab, shape.dim, shape.layers, block, tie_embeddings=shape.tied, context=shape.context)


@dataclass(frozen=True)
class PackedTensors:
    """A reader of a checkpoint with weights in blocks of `kind`: shapes only; values are drawn where they are used."""

    shapes: dict[str, tuple[int, ...]]
    kind: Any
    path: Path = Path("packed")

    def keys(self) -> Any:
        return self.shapes

    def shape(self, key: str) -> tuple[int, ...]:
        return self.shapes[key]

    def dtype(self, _: str) -> Any:
        return self.kind

    def read(self, *_: Any) -> Any:
        raise TypeError("these weights have no values")

    read_blocks = read


def generate(shape: Shape, device: str, model: Any = None) -> tuple[Any, Callable[[], Any]]:
    """Return the generated module of this shape, with random weights or those of `model`, and a builder of its step."""
    from weft.backends.target import TARGETS
    from weft.backends.torch import kernels
    from weft.backends.torch.codegen.model_source import write_source
    from weft.backends.torch.lower.lower import lower
    from weft.backends.torch.package.module import assign_weights, build_step, run_source
    from weft.frontends.app.api.modules import build_step_graphs
    from weft.frontends.app.api.source.sources import load_source
    from weft.passes import run_passes

    graph = load_source(architecture(shape)).graph
    graph = run_passes(graph, TARGETS["torch"].pipeline(graph, "f32"))
    if shape.bits < 16:
        _store_codes(graph, shape.bits)
    forms = build_step_graphs(graph)
    with torch.device("meta"):
        source = write_source(lower(forms["model"], shape.bits == 8), kernels.__name__)
        module: nn.Module = run_source(source.text).Model()
    source_weights = {} if model is None else model.state_dict()
    weights = {}
    for number, (key, value) in enumerate(module.state_dict().items()):
        if model is None:
            packed = value.dtype in (torch.int32, torch.float16) or "scale" in key  # codes and scales keep their dtype
            kind = value.dtype if packed else torch.bfloat16
            weights[key] = torch.empty(value.shape, dtype=kind, device=device)
            randomize(weights[key], key, number, floats=shape.bits == 8)
        else:
            weights[key] = _find_weight(source_weights, key)
    assign_weights(module, weights)
    module.eval().requires_grad_(False)
    return module, partial(build_step, forms, module, float8_caches=shape.bits == 8)


def _store_codes(graph: Graph, bits: int) -> None:
    """Give all linear layers of the graph weights that the checkpoint stores in Q4_0 or FP8, and keep these."""
    from weft.ir import ops
    from weft.ir.graph import Param
    from weft.ir.recipes.combinators import Source
    from weft.ir.types import dtypes
    from weft.passes import Trace
    from weft.passes.library.target.stored_codes import KeepBlocks

    weights = {w.name: w for node in graph.nodes if node.op is ops.linear and isinstance(w := node.inputs[1], Param)}
    for name, weight in weights.items():
        weight.recipe = Source(name)
    kind = dtypes.q4_0 if bits == 4 else dtypes.f8e4m3_128
    graph.reader = PackedTensors({name: weight.type.concrete({}) for name, weight in weights.items()}, kind)
    KeepBlocks("all").run(graph, Trace())


def _find_weight(weights: dict[str, Tensor], key: str) -> Tensor:
    """Return the weight `key` from those of transformers, where gate and up of the experts are one stacked tensor."""
    layer, _, expert = key.partition(".experts.")
    if expert:
        stacks = f"model.{layer.replace('ffn', 'mlp')}.experts"
        if expert == "down":
            return weights[f"{stacks}.down_proj"]
        return weights[f"{stacks}.gate_up_proj"].chunk(2, 1)[expert == "up"]
    name = ".".join(NAMES.get(part, part) for part in key.split(".")).replace("mlp.router", "mlp.gate")
    return weights[f"model.{name}" if name.startswith("layers.") else name]


class Decoder(ABC):
    """Decode batches: `first` holds the logits [batch, vocab] after the prompt, `token` [batch, 1] the last token."""

    first: Tensor
    token: Tensor

    @abstractmethod
    def start(self, ids: Tensor) -> None:
        """Read the prompts [batch, n] and choose the first token of each."""

    @abstractmethod
    def logits(self) -> Tensor:
        """Return the logits [batch, vocab] after `token`, and append it to the cache."""

    @torch.no_grad()
    def step(self) -> Tensor:
        """Return the next tokens [batch, 1], on the device and without waiting for it."""
        self.token = self.logits().argmax(-1, keepdim=True)
        return self.token

    @torch.no_grad()
    def force(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Return logits [n, vocab] in f32 after the prompt [1, p] and after each of `tokens` [1, n] except the last."""
        self.start(ids)
        rows = [self.first.float()]
        for i in range(tokens.shape[1] - 1):
            self.token.copy_(tokens[:, i : i + 1])  # in place, because graphs read it
            rows.append(self.logits().float())
        return torch.cat(rows)


class Eager(Decoder):
    """Decode by transformers without options: SDPA and a cache that grows by concatenation."""

    def __init__(self, model: Any, batch: int = 1) -> None:
        self.model = model
        self.experts = "batched_mm" if batch == 1 else "grouped_mm"  # the former copies the weights of routed experts
        self.prefilled: dict[tuple[int, int, int], tuple[list[tuple[Tensor, Tensor]], Tensor]] = {}
        self.cache: Any = None

    def prefill(self, ids: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Return keys and values of every layer, and the logits [batch, vocab] after the prompt."""
        from transformers import DynamicCache

        key = (ids.data_ptr(), *ids.shape)
        if key not in self.prefilled:
            cache: Any = DynamicCache(config=self.model.config)
            mixture = hasattr(self.model.config, "num_experts")
            if mixture:
                self.model.set_experts_implementation("grouped_mm")
            logits = run_transformers(self.model, ids, cache)
            if mixture:
                self.model.set_experts_implementation(self.experts)
            self.prefilled = {key: ([(layer.keys, layer.values) for layer in cache.layers], logits)}
        return self.prefilled[key]

    @torch.no_grad()
    def start(self, ids: Tensor) -> None:
        from transformers import DynamicCache

        layers, self.first = self.prefill(ids)
        self.cache = DynamicCache(config=self.model.config)
        for i, (keys, values) in enumerate(layers):
            self.cache.update(keys, values, i)
        self.token = self.first.argmax(-1, keepdim=True)

    def logits(self) -> Tensor:
        return run_transformers(self.model, self.token, self.cache)


class Static(Eager):
    """Decode by transformers with its static cache of `capacity` tokens.

    `mode` is one of torch.compile's, or "graph": capture the uncompiled step, so that the host costs nothing.
    """

    def __init__(self, model: Any, capacity: int, mode: str, batch: int = 1) -> None:
        super().__init__(model, batch)
        from transformers import StaticCache

        self.cache = StaticCache(config=model.config, max_cache_len=capacity)
        self.mode = mode
        self.position = torch.empty(0)
        self.replay: Callable[[], object] | None = None
        self.run: Any = self._logits_at
        if mode != "graph":
            torch._dynamo.reset()
            self.run = torch.compile(self._logits_at, mode=mode, fullgraph=True, dynamic=False)

    def _logits_at(self, token: Tensor, position: Tensor) -> Tensor:
        return run_transformers(self.model, token, self.cache, position_ids=position)

    @torch.no_grad()
    def start(self, ids: Tensor) -> None:
        layers, self.first = self.prefill(ids)
        self._fill(ids, layers)
        token = self.first.argmax(-1, keepdim=True)
        if self.mode != "graph":
            self.token = token
            return
        if self.replay is None:
            self.token = token.clone()
            self.replay = capture([self._advance])
            self._fill(ids, layers)
        self.token.copy_(token)

    def _fill(self, ids: Tensor, layers: list[tuple[Tensor, Tensor]]) -> None:
        """Reset the cache to its state after the prompt, and the position; both in place, because graphs hold them."""
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
        if self.replay is None:
            return super().step()
        self.replay()
        return self.token

    def logits(self) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        logits: Tensor = self.run(self.token, self.position).clone()
        self.position.add_(1)
        return logits


def run_transformers(model: Any, ids: Tensor, cache: Any, **more: Any) -> Tensor:
    """Run a model of transformers on `ids` [batch, n], extend `cache`, and return the last logits [batch, vocab]."""
    logits: Tensor = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **more).logits[:, -1]
    return logits


TRANSFORMERS = {"hf_eager": "", "hf_static_graph": "graph", "hf_static_compiled": "reduce-overhead"}
AUTOTUNED = {"hf_static_autotuned": "max-autotune"}  # minutes of compilation


def build_transformers(name: str, shape: Shape, device: str, batch: int, capacity: int, model: Any = None) -> Decoder:
    """Build a decoder of transformers for `capacity` tokens per sequence, with random weights or those of `model`."""
    if model is None:
        model = hugging_face(shape, device)
        if shape.bits == 4:
            use_int4(model)
    mode = (TRANSFORMERS | AUTOTUNED)[name]
    return Static(model, capacity, mode, batch) if mode else Eager(model, batch)
