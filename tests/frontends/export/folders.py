"""A Llama of one layer as a Hugging Face folder, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

DIM, HEADS, KV_HEADS, FFN, VOCAB = 8, 4, 2, 12, 11
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
LAYER, HEAD = "model.layers.0.", DIM // HEADS
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCAB, DIM),
    f"{LAYER}self_attn.q_proj.weight": (DIM, DIM),
    f"{LAYER}self_attn.k_proj.weight": (KV_HEADS * HEAD, DIM),
    f"{LAYER}self_attn.v_proj.weight": (KV_HEADS * HEAD, DIM),
    f"{LAYER}self_attn.o_proj.weight": (DIM, DIM),
    f"{LAYER}mlp.gate_proj.weight": (FFN, DIM),
    f"{LAYER}mlp.up_proj.weight": (FFN, DIM),
    f"{LAYER}mlp.down_proj.weight": (DIM, FFN),
    f"{LAYER}input_layernorm.weight": (DIM,),
    f"{LAYER}post_attention_layernorm.weight": (DIM,),
    "model.norm.weight": (DIM,),
    "lm_head.weight": (VOCAB, DIM),
}


def make_tensors(dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Return random tensors of the model."""
    rng = np.random.default_rng(0)
    return {key: rng.standard_normal(shape).astype(dtype) for key, shape in SHAPES.items()}


def write_llama(folder: Path, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Write the model to `folder`; return its tensors."""
    folder.mkdir()
    tensors = make_tensors(dtype)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors
