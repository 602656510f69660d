"""Models whose heads, hidden units and experts four devices share evenly, and their folders."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft import MLA, MLP, Attention, Block, Decoder, GatedMLP, LayerNorm, LearnedPositions, MoE, RMSNorm, RoPE, Router
from weft.backends.torch.transformers.transformers_folder import TransformersFolder
from weft.ir import Graph

from ...backends.torch.transformers.folders import folder_of, lowered
from ...e2e.random_models import strong

VOCAB, DIM, LAYERS, LENGTH = 64, 32, 4, 32
GROUPED = Attention(8, 4, head_dim=4, rope=RoPE())
PLAIN = Block(GROUPED, GatedMLP(48), RMSNorm())
NORMED = Attention(8, 4, head_dim=8, rope=RoPE(), qk_norm=RMSNorm(), qkv_bias=True)
GATED = Attention(8, 4, head_dim=4, rope=RoPE(), gate=True, out_bias=True)
LOCAL = Block(Attention(8, 4, head_dim=4, rope=RoPE(), window=5), GatedMLP(48, "gelu_tanh"), RMSNorm())
SHARING = MoE(8, 16, 2, shared=GatedMLP(24), shared_gate=True)
LATENT = Block(MLA(4, 8, 6, 4, 6, RoPE()), MoE(8, 16, 2, router=Router(scoring="sigmoid", correction=True)), RMSNorm())
OPTIONS: dict[str, Any] = {"context": LENGTH}
MODELS = {
    "llama": Decoder(VOCAB, DIM, [PLAIN] * LAYERS, **OPTIONS),
    "tied": Decoder(VOCAB, DIM, [PLAIN] * LAYERS, tie_embeddings=True, **OPTIONS),
    "qwen3": Decoder(VOCAB, DIM, [Block(NORMED, GatedMLP(48), RMSNorm())] * LAYERS, **OPTIONS),
    "gated": Decoder(VOCAB, DIM, [Block(GATED, GatedMLP(48), RMSNorm())] * LAYERS, **OPTIONS),
    "gemma": Decoder(
        VOCAB, DIM, [LOCAL, PLAIN] * 2, embed_scale=5.0, logit_softcap=9.0, tie_embeddings=True, **OPTIONS
    ),
    "gpt": Decoder(
        *(VOCAB, DIM, [Block(Attention(4, qkv_bias=True, out_bias=True), MLP(64, bias=True), LayerNorm())] * LAYERS),
        positions=LearnedPositions(LENGTH),
        **OPTIONS,
    ),
    "mixtral": Decoder(VOCAB, DIM, [Block(GROUPED, MoE(8, 16, 2), RMSNorm())] * LAYERS, **OPTIONS),
    "sharing": Decoder(VOCAB, DIM, [Block(NORMED, SHARING, RMSNorm())] * LAYERS, **OPTIONS),
    "deepseek": Decoder(VOCAB, DIM, [PLAIN, LATENT, LATENT, LATENT], **OPTIONS),
}
STAGED = [*(name for name in MODELS if name not in ("gemma", "gpt"))]
EXPERTS = ["mixtral", "sharing", "deepseek"]


def graph_named(name: str) -> Graph:
    """The graph of one of `MODELS`, or of ``drawn/SEED``, lowered for folders, with weights that tell all apart."""
    kind, _, seed = name.partition("/")
    model = drawn(int(seed)) if kind == "drawn" else MODELS[name]
    return lowered(strong(model.graph(name=name)))


def folder_named(name: str, parent: Path) -> tuple[Path, TransformersFolder]:
    """Write the folder of one of `MODELS`."""
    folder = parent / name
    return folder, folder_of(graph_named(name), folder)


def tokens(rows: int = 2, length: int = 9) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(1, VOCAB, (rows, length))


def drawn(seed: int) -> Decoder:
    """A random decoder of parts that engines take, in sizes that four devices share evenly."""
    one = random.Random(seed).choice
    kv_heads, act = one((4, 8)), one(("silu", "gelu", "relu2", "gelu_tanh"))
    norm = one((RMSNorm(), RMSNorm(weight=False), LayerNorm(), LayerNorm(bias=False)))
    scored = {"qkv_bias": one((True, False)), "out_bias": one((True, False)), "gate": one((True, False))}
    scored |= one(({}, {"qk_norm": RMSNorm()}, {"qk_norm": LayerNorm()}, {"qk_norm": RMSNorm(), "qk_norm_full": True}))
    scored |= one(({}, {"scale": 0.3}, {"softcap": 5.0}))
    windows = one(((None,), (5,), (5, None)))
    shared = one(({}, {"shared": GatedMLP(16)}, {"shared": GatedMLP(16), "shared_gate": True}))
    routed = one(({}, {"scoring": "sigmoid", "renormalize": False}, {"correction": True, "scoring": "sigmoid"}))
    ffn = one(
        (GatedMLP(24, act), MLP(24, act, bias=one((True, False))), MoE(8, 16, one((1, 2, 3)), **shared, **routed))
    )
    arrangement = one(("pre", "post", "parallel", "sandwich"))
    blocks = [
        Block(Attention(8, kv_heads, head_dim=8, rope=RoPE(), window=w, **scored), ffn, norm, arrangement=arrangement)
        for w in windows
    ]
    options = one(({}, {"tie_embeddings": True}, {"head_bias": True}, {"logit_scale": 0.3}, {"logit_softcap": 9.0}))
    return Decoder(VOCAB, DIM, blocks * (LAYERS // len(blocks)), **OPTIONS, **options)
