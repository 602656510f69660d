"""K- and I-quants from blocks to logits: a file of random blocks against transformers with their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quant_shape_to_byte_shape

import weft

from .families import LENGTH, error, reference

# kind -> where a block of 256 keeps its float16 scales
SCALES = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ2_S: (0,),
    Type.IQ4_XS: (0,),
}
HEADS, WIDTH, HIDDEN, VOCAB = 4, 256, 512, 96


def blocks(kind: Type, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Random blocks of a weight [rows, columns] whose values have a deviation of about 0.1."""
    rows, width = quant_shape_to_byte_shape(shape, kind)
    size = width // (shape[1] // 256)
    raw = rng.integers(0, 256, (rows, shape[1] // 256, size)).astype(np.uint8)
    scale = np.ones(1, np.float16)
    for at in SCALES[kind]:
        raw[..., at : at + 2] = scale.view(np.uint8)
    deviation = dequantize(raw.reshape(rows, width), kind).std()
    for at in SCALES[kind]:
        raw[..., at : at + 2] = (scale * np.float16(0.1 / deviation)).view(np.uint8)
    return raw.reshape(rows, width)


def halves(x: np.ndarray) -> np.ndarray:
    """Rows of q or k from llama.cpp's interleaved pairs to transformers' halves."""
    return x.reshape(HEADS, -1, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def write(path: Path, kind: Type) -> dict[str, np.ndarray]:
    """A Llama of one layer with all matrices in `kind`; returns transformers' names with the values of the blocks."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(VOCAB)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    shapes = dict.fromkeys(("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o"), (WIDTH, WIDTH))
    shapes |= {"mlp.gate": (HIDDEN, WIDTH), "mlp.up": (HIDDEN, WIDTH), "mlp.down": (WIDTH, HIDDEN)}
    full = {f"model.layers.0.{name}_proj.weight": shape for name, shape in shapes.items()}
    state: dict[str, np.ndarray] = {}
    for name, shape in {"model.embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH), **full}.items():
        raw = blocks(kind, shape, rng)
        value = dequantize(raw, kind)
        state[name] = halves(value) if ".q_proj" in name or ".k_proj" in name else value
        writer.add_tensor(names.get_name(name, (".weight",)), raw, raw_dtype=kind)
    for name in ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"):
        state[f"{name}.weight"] = rng.uniform(0.5, 1.5, WIDTH).astype(np.float32)
        writer.add_tensor(f"{names.get_name(name)}.weight", state[f"{name}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


@pytest.mark.halved
@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
def test_quantized_files_agree_with_their_dequantized_values(kind: Type, target: str, tmp_path: Path) -> None:
    state = write(tmp_path / "model.gguf", kind)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": HIDDEN}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=HEADS)
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict({name: torch.from_numpy(x) for name, x in state.items()})
    weft.compile(tmp_path / "model.gguf", tmp_path / "out", target=target, passes="default,-last-token-logits")
    ids = np.random.default_rng(1).integers(0, VOCAB, (1, LENGTH))
    want = reference(model, ids)[0]
    ours = weft.load(tmp_path / "out")
    assert max(error(ours.logits(ids[0].tolist(), chunk=chunk), want) for chunk in (LENGTH, 5)) < 1e-4
