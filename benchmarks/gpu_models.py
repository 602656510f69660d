"""The shapes that are measured, as Hugging Face models with random weights on the device and in weft's language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.backends.torch.kernels.shared.float8 import to_float8

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
        value.copy_(to_float8(drawn).view(torch.int32))
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
