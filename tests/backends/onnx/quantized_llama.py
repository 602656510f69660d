"""Write tiny llamas in GGUF files whose tensors are stored in chosen quantized blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import quantize

DIM, FFN, VOCAB, HEADS, KV_HEADS, LAYERS = 64, 96, 160, 4, 2, 2


def write(
    path: Path,
    kinds: Mapping[str, Type],
    blocks: Mapping[str, np.ndarray] = MappingProxyType({}),
    *,
    dim: int = DIM,
    ffn: int = FFN,
    vocab: int = VOCAB,
    std: float = 0.3,
    store: Callable[[np.ndarray, Type], np.ndarray] = quantize,
) -> Path:
    """Write a tiny llama whose tensors are stored as `kinds` says, by the last part of their name ("": all others);
    `blocks` replace the result of `store` for some tensors."""
    rng = np.random.default_rng(3)
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(vocab)
    writer.add_embedding_length(dim)
    writer.add_feed_forward_length(ffn)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    kv = dim // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, dim), "output_norm": (dim,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{n}": (dim,) for n in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.attn_q": (dim, dim), f"blk.{i}.attn_k": (kv, dim), f"blk.{i}.attn_v": (kv, dim)}
        shapes |= {f"blk.{i}.attn_output": (dim, dim), f"blk.{i}.ffn_gate": (ffn, dim)}
        shapes |= {f"blk.{i}.ffn_up": (ffn, dim), f"blk.{i}.ffn_down": (dim, ffn)}
    for name, shape in shapes.items():
        w = rng.standard_normal(shape).astype(np.float32) * np.float32(std if len(shape) == 2 else 1)
        kind = kinds.get(name.rsplit(".", 1)[-1], kinds[""]) if len(shape) == 2 else Type.F32
        stored = blocks.get(f"{name}.weight", w if kind == Type.F32 else store(w, kind))
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def products(folder: Path) -> Counter[str]:
    nodes = onnx.load(folder / "model.onnx", load_external_data=False).graph.node
    return Counter(n.op_type for n in nodes if "MatMul" in n.op_type)
