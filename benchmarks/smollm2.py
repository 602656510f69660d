"""Prepare SmolLM2-135M for benchmarks: the GGUF, and its dequantized weights as a Hugging Face folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
GGUF = ROOT / ".cache" / "weights" / "SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_folder(gguf_path: Path, out: Path, tokenizer: bool = True) -> Path:
    """Write the GGUF's weights, dequantized to float32, as a LlamaForCausalLM folder, without weft.

    Transformers parses the file again for the tokenizer, which takes seconds.
    """
    import gguf
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    out.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(gguf_path)
    state = {}
    for t in reader.tensors:
        shape = tuple(int(s) for s in t.shape)[::-1]
        array = dequantize(t.data, t.tensor_type).astype(np.float32).reshape(shape)
        _, *rest = t.name.split(".")
        if t.name == "token_embd.weight":
            state["model.embed_tokens.weight"] = array
        elif t.name == "output_norm.weight":
            state["model.norm.weight"] = array
        else:
            layer, kind, _ = rest
            heads = {"attn_q": 9, "attn_k": 3}.get(kind)
            if heads:  # llama.cpp interleaves the two halves of every head
                array = array.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(array.shape)
            state[f"model.layers.{layer}.{NAMES[kind]}.weight"] = np.ascontiguousarray(array)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    if tokenizer:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name).save_pretrained(out)
    return out


def builder_command(source: Path, out: Path, *options: str) -> list[str]:
    """Return the command by which onnxruntime-genai builds its fp32 CPU model from a Hugging Face folder."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(out)]
    command += ["-p", "fp32", "-e", "cpu", "-c", str(out) + ".cache"]
    return [*command, "--extra_options", *options] if options else command
