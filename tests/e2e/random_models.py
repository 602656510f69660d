"""Random architectures in the declarative language: a seed is a model."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from weft import (
    MLA,
    MLP,
    ALiBi,
    Attention,
    Block,
    CrossAttention,
    Decoder,
    Encoder,
    EncoderDecoder,
    GatedMLP,
    LayerNorm,
    LearnedPositions,
    LinearAttention,
    Mamba,
    Mamba2,
    MoE,
    RelativeAttention,
    Repeat,
    RMSNorm,
    RoPE,
    Sinusoidal,
    T5Bias,
)
from weft.frontends.dsl.blocks import ARRANGEMENTS
from weft.ir import Graph
from weft.ir.ops.softmax_attention import PATTERNS
from weft.ir.recipes import Full, Normal

VOCAB, LENGTH = 53, 16
NORMS = (RMSNorm(), RMSNorm(weight=False), LayerNorm(), LayerNorm(bias=False), LayerNorm(1e-3, weight=False))
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "gelu_quick", "silu", "elu", "relu2", "swish(1.5)", "tanh", "identity")
SCALINGS: tuple[dict[str, Any], ...] = (
    *({"scaling": name} for name in ("linear", "ntk", "proportional")),
    *({"scaling": name, "original": 8} for name in ("dynamic", "yarn", "llama3")),
)


class Drawn:
    """Draw the parts of a model from a `seed`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.one = self.random.choice

    def some(self, chance: float = 0.25, **settings: Any) -> dict[str, Any]:
        """Each of `settings` with a `chance`, so that most are left at their defaults."""
        return {name: value for name, value in settings.items() if self.random.random() < chance}

    def rope(self, head: int, **limits: Any) -> RoPE:
        rotated = self.random.randrange(4, head + 1, 2)
        scaling = self.one(SCALINGS) | {"factor": 2.0, "rotated": rotated // 4} if self.one((True, False)) else {}
        options = self.some(interleaved=True, amplitude=1.2) | limits
        return RoPE(theta=self.one((100.0, 1e4)), **self.some(0.5, dim=rotated), **scaling, **options)

    def attention(self, kind: type[Attention] = Attention) -> Attention:
        heads, head = self.one((1, 2, 4, 6)), self.one((4, 5, 8, 12, 16, 24))
        shared = {"kv_heads": self.one([n for n in (1, 2, 3, 6) if heads % n == 0])}
        options = self.some(qkv_bias=True, out_bias=True, sinks=True, gate=True, clip=0.7, scale=0.3, softcap=5.0)
        norms = {"qk_norm": self.one(NORMS), **self.one(({}, {"qk_norm_full": True}, {"qk_norm_each": True}))}
        options |= norms if self.one((True, False, False)) else {}
        if kind is Attention:
            stride = self.random.randint(1, 6)
            pattern = {"pattern": self.one(PATTERNS), "stride": stride, "summary": self.random.randint(1, stride)}
            options |= pattern if self.one((True, False, False)) else {}
            options |= self.some(0.5, window=self.random.randint(1, 12))
            place = self.one(("rope" if head % 2 == 0 else "bias", "bias", "none"))
            bias = self.one((ALiBi(), T5Bias(self.one((4, 7, 32)), 20)))
            options |= {"rope": {"rope": self.rope(head)}, "bias": {"bias": bias}, "none": {}}[place]
        return kind(heads, head_dim=head, **self.some(0.5, **shared), **options)

    def mixer(self, causal: bool) -> Any:
        """Of a width that four heads divide into even parts."""
        groups = self.one((1, 2))
        other = [
            RelativeAttention(4, self.one((1, 5)), **self.some(values=False, bias=True)),
            LinearAttention(4, **self.some(0.5, rope=self.rope(4, amplitude=1.0), bias=True)),
        ]
        if causal:
            inner = {**self.some(conv_bias=False, bias=True), "conv": self.one((2, 4))}
            other += [
                MLA(3, 8, 6, 4, 5, self.rope(4), **self.some(0.5, q_rank=9, norm=self.one(NORMS), scale=0.3)),
                Mamba(33, self.one((1, 5)), **inner, **self.some(dt_rank=3, norms=RMSNorm())),
                Mamba2(24, 4, self.one((1, 7)), groups, **inner, norm_groups=groups),
            ]
        return self.one([self.attention()] * len(other) + other)

    def ffn(self) -> Any:
        """Without routers that compare tokens: what they choose depends on how a text is cut into calls."""
        activation, gated = self.one(ACTIVATIONS), self.one((True, False))
        plain = MLP(self.one((9, 24)), activation, **self.some(bias=True))
        wide = GatedMLP(self.one((9, 24)), activation, **self.some(bias=True, limit=2.0))
        options = self.some(bias=True, router_bias=True, aux_loss=0.01, noisy=True, shared=plain)
        options |= {"activation": activation, "gated": gated}
        options |= self.some(limit=3.0, shift=1.0) if gated else {}
        options |= self.some(0.5, shared_gate=True) if "shared" in options else {}
        scoring = {"scoring": "sigmoid", "renormalize": False, "correction": True, "scale": 2.5}
        grouped = {"groups": 2, "top_groups": 1, "group_score": self.one(("max", "top2"))}
        levels = {"choice": "hierarchical", "groups": 4, "top_groups": 2}
        ways = self.one((self.some(0.5, **scoring), self.some(0.5, **scoring) | grouped, levels))
        return self.one((plain, wide, MoE(8, self.one((5, 16)), self.one((1, 2)), **options, **ways), None))

    def layers(self, causal: bool, crossing: bool = False) -> list[Any]:
        kinds = []
        for _ in range(self.random.randint(1, 3)):
            settings = {"norm": self.one(NORMS), "arrangement": self.one(ARRANGEMENTS), **self.some(residual_scale=0.5)}
            cross = {"cross": self.attention(CrossAttention)} if crossing else {}
            block = Block(self.mixer(causal), self.ffn(), **settings, **cross)
            kinds.append(self.one((block, block, block, Repeat(block, 2))))
        return [self.one(kinds) for _ in range(self.random.randint(2, 3))]

    def shared(self) -> dict[str, Any]:
        """Arguments common to decoders and encoders."""
        positions = self.one((LearnedPositions(LENGTH + 1, 2), LearnedPositions(LENGTH), Sinusoidal(LENGTH + 4)))
        return self.some(
            0.3, positions=positions, embed_scale=3.0, embed_norm=self.one(NORMS), context=self.one((8, LENGTH))
        )

    def decoder(self, dim: int | None = None, crossing: bool = False) -> Decoder:
        options = self.some(tie_embeddings=True, final_norm=False, head_bias=True, logit_scale=0.3, logit_softcap=9.0)
        layers = self.layers(True, crossing)
        return Decoder(VOCAB, dim or self.one((16, 24, 40)), layers, **self.shared(), **options)

    def encoder(self, dim: int | None = None) -> Encoder:
        options = self.some(0.3, pooler=True, embed_dim=12, token_types=2) if dim is None else {}
        layers = self.layers(False)
        return Encoder(VOCAB, dim or self.one((16, 24, 40)), layers, **self.shared(), final_norm=RMSNorm(), **options)

    def encoder_decoder(self) -> EncoderDecoder:
        dim = self.one((16, 24))
        return EncoderDecoder(self.encoder(dim), self.decoder(dim, True), share_embeddings=self.one((True, False)))


def strong(graph: Graph, std: float = 0.3) -> Graph:
    """`graph` with weights, norms and biases that all matter, the weights of so much deviation."""
    for name, p in graph.params.items():
        if isinstance(p.recipe, Normal):
            p.recipe = replace(p.recipe, std=std)
        elif isinstance(p.recipe, Full):
            p.recipe = Normal(p.recipe.dims, 0.4, name, mean=p.recipe.value)
    return graph
