"""The shapes that are measured, as Hugging Face models with random weights on the device and in weft's language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Shape:
    """A Llama by its sizes."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    tied: bool
    factor: float  # of the rope scaling of Llama 3.1
    context: int = 131_072

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def products(self) -> dict[str, tuple[int, int]]:
        """[out, in] of each matrix of a layer."""
        kv = self.kv_heads * self.head_dim
        return {
            "qkv": (self.dim + 2 * kv, self.dim),
            "out": (self.dim, self.dim),
            "gate_up": (2 * self.hidden, self.dim),
            "down": (self.dim, self.hidden),
        }

    def weights(self) -> int:
        """Numbers a decoding step reads: all products and norms, and the head; one row of the embedding is nothing."""
        layer = sum(out * inner for out, inner in self.products().values()) + 2 * self.dim
        return self.layers * layer + self.vocab * self.dim + self.dim

    def step_bytes(self, length: int, item: int = 2) -> int:
        """Bytes a decoding step must read when `length` tokens are cached."""
        return item * (self.weights() + length * self.layers * 2 * self.kv_heads * self.head_dim)


LLAMA_8B = Shape(128_256, 4096, 32, 32, 8, 14_336, tied=False, factor=8.0)
LLAMA_1B = Shape(128_256, 2048, 16, 32, 8, 8192, tied=True, factor=32.0)
LLAMA_3B = Shape(128_256, 3072, 28, 24, 8, 8192, tied=True, factor=32.0)
TINY = Shape(512, 128, 2, 4, 2, 256, tied=True, factor=32.0, context=4096)
SHAPES = {"llama3.1-8b": LLAMA_8B, "llama3.2-3b": LLAMA_3B, "llama3.2-1b": LLAMA_1B, "tiny": TINY}


def hugging_face(shape: Shape, device: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """LlamaForCausalLM of this shape, its weights drawn on the device by `randomize`."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    factory: Any = AutoModelForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.hidden,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.tied,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": shape.factor,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    )
    with torch.device(device):
        model = factory.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    randomize(model, seed)
    return model.requires_grad_(False)


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Normal weights of variance 1 / fan-in, so that activations keep their size; logits of standard deviation 3.

    With these the next token is neither certain nor a toss of dice, and layers, not the embedding, decide it. Drawn as
    f32 and rounded once, so that a seed means the same numbers in every dtype but for that rounding.
    """
    for number, (name, value) in enumerate(model.named_parameters()):
        generator = torch.Generator(value.device).manual_seed(1000 * seed + number)
        if value.ndim < 2:
            drawn = 1 + 0.1 * torch.randn(value.shape, generator=generator, device=value.device)
        else:
            scale = (3 if "embed" in name or "lm_head" in name else 1) / value.shape[-1] ** 0.5
            drawn = torch.randn(value.shape, generator=generator, device=value.device).mul_(scale)
        value.copy_(drawn)


def architecture(shape: Shape) -> Any:
    """The same model in weft's language."""
    from weft.frontends.dsl import Attention, Block, Decoder, GatedMLP, RMSNorm
    from weft.frontends.dsl import RoPE as Rope

    rope = Rope(500_000, scaling="llama3", factor=shape.factor, original=8192, low_freq=1, high_freq=4)
    block = Block(Attention(shape.heads, shape.kv_heads, rope=rope), GatedMLP(shape.hidden), RMSNorm(1e-5))
    return Decoder(shape.vocab, shape.dim, shape.layers, block, tie_embeddings=shape.tied, context=shape.context)


def prompt(shape: Shape, batch: int, length: int, device: str, seed: int = 0) -> torch.Tensor:
    """Random tokens [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, shape.vocab, (batch, length), generator=generator).to(device)
