"""Tiny Hugging Face models in GGUF files: what llama.cpp's converter makes of their names, rows and configs.

Names are those of the gguf package's `tensor_mapping`; the changes to the weights are written here from what each
architecture of llama.cpp expects.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
from safetensors.numpy import load_file

from .gguf_further import FURTHER
from .gguf_hybrids import HYBRIDS
from .gguf_sparse import SPARSE, rearranged

HEADS, GROUPS = 4, 2
ENCODERS = ("bert", "modern-bert", "eurobert", "nomic-bert")
PREFIXES = {"bloom": "transformer.", "bert": "bert.", "modern-bert": "model.", "nomic-bert": "nomic_bert."}
SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe")  # norms by 1 + weight
REORDERED = (
    "llama",
    "granite",
    "granitemoe",
    "olmo",
    "smollm3",
    "arcee",
    "granitehybrid",
    "mistral3",
)  # q and k, for RoPE of neighbours


def interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter gives q and k (LlamaModel.permute)."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def ungrouped(x: np.ndarray, groups: int) -> np.ndarray:
    """Rows of q, k and v from one run per key/value head to all queries, all keys, all values."""
    runs = x.reshape(groups, HEADS // groups + 2, -1, *x.shape[1:])
    return np.concatenate([part.reshape(-1, *x.shape[1:]) for part in (runs[:, :-2], runs[:, -2], runs[:, -1])])


def per_head(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Norms of each head, stacked."""
    heads: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors):
        if ".norms." in name:
            heads.setdefault(f"{name.partition('.norms.')[0]}.weight", []).append(tensors[name])
    return {n: x for n, x in tensors.items() if ".norms." not in n} | {n: np.stack(x) for n, x in heads.items()}


def converted(arch: str, name: str, x: np.ndarray, groups: int) -> np.ndarray:
    """Tensor `name` of a Hugging Face checkpoint as llama.cpp's converter stores it."""
    if arch in REORDERED and ("q_proj" in name or "k_proj" in name):
        return interleaved(x, HEADS if "q_proj" in name else groups)
    if arch in SHIFTED and name.endswith("norm.weight") and "linear_attn" not in name:
        return x + np.float32(1)
    if arch == "gpt2" and x.ndim == 2 and ("attn" in name or "mlp" in name):
        return x.T
    if arch in ("bloom", "gptneox", "falcon") and "query_key_value" in name:
        return ungrouped(x, groups)
    return x


def write_gguf(
    path: Path,
    folder: Path,
    arch: str,
    extra: dict[str, np.ndarray],
    tokenizer: bool,
    metadata: dict[str, Any],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> None:
    """The weights of the tiny Hugging Face model in `folder` as a GGUF file of architecture `arch`; matrices whose rows
    are whole blocks are stored as `kind`."""
    writer = gguf.GGUFWriter(path, arch)
    facts = {
        "vocab_size": 97,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "block_count": 3,
        "attention.head_count": HEADS,
        "attention.head_count_kv": GROUPS,
        "context_length": 64,
        "rope.freq_base": 10_000.0,
        **({} if "attention.layer_norm_epsilon" in metadata else {"attention.layer_norm_rms_epsilon": 1e-6}),
        **metadata,
    }
    for key, value in facts.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
        whole = key.startswith((f"{arch}.", "general.", "tokenizer.", "magic."))
        add.get(type(value), writer.add_array)(key if whole else f"{arch}.{key}", value)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([f"t{i}" for i in range(97)])
        writer.add_token_types([1] * 97)
        writer.add_token_merges(["t 0"])
        writer.add_eos_token_id(5)
    known = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch)
    names, tensors = gguf.get_tensor_name_map(known, facts["block_count"]), load_file(folder / "model.safetensors")
    for kind_of_number in ("alpha_n", "alpha_p", "beta", "eps") if arch == "apertus" else ():
        of_layers = [n for n in sorted(tensors) if n.endswith(f"act_fn.{kind_of_number}")]
        writer.add_array(f"xielu.{kind_of_number}", [float(tensors.pop(n).item()) for n in of_layers])
    for name, tensor in rearranged(arch, per_head(tensors)).items():
        if arch in ENCODERS and name.startswith(("cls.", "head.", "decoder.", "lm_head")):  # of no use for features
            continue
        short = name.removeprefix(PREFIXES.get(arch, ""))
        found = names.get_name(short, try_suffixes=(".weight", ".bias")) or name
        tensor = converted(arch, name, tensor, np.max(facts["attention.head_count_kv"]))
        stored = kind if tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(found, gguf.quants.quantize(np.ascontiguousarray(tensor), stored), raw_dtype=stored)
    if arch == "gemma4":  # a quarter of global heads of 16 numbers turns
        extra = {"rope_freqs.weight": np.array([1.0] * 2 + [1e30] * 6, np.float32)} | extra
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


MHA = {"attention.head_count_kv": HEADS}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
WIDE = {"feed_forward_length": 128}  # four times the width
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "num_key_value_heads": GROUPS, "sliding_window": 8}
SHORT, LONG = [1.0, 1.2, 1.4, 1.6], [1.0, 2.0, 3.0, 4.0]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "attention_factor": 1.25,
    "original_max_position_embeddings": 16,
}
# architecture -> model_type, config, metadata
MODELS: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "llama": [
        ("llama", {"num_key_value_heads": 2}, {}),
        (
            "llama",
            {"num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
            {},
        ),
        (
            "llama",
            {"num_key_value_heads": 2, "head_dim": 12},
            {"attention.key_length": 12, "rope.dimension_count": 12},
        ),
        (
            "llama",
            {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ),
        (
            "llama",
            {
                "num_key_value_heads": 2,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            },
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
            },
        ),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": None, "rms_norm_eps": 1e-6}, {}),
    ],
    "qwen2": [("qwen2", {"num_key_value_heads": 2}, {})],
    "qwen3": [
        (
            "qwen3",
            {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
            {"attention.key_length": 16},
        )
    ],
    "granite": [
        (
            "granite",
            {
                "num_key_value_heads": 2,
                "embedding_multiplier": 6.0,
                "attention_multiplier": 0.25,
                "residual_multiplier": 0.5,
                "logits_scaling": 4.0,
            },
            {"embedding_scale": 6.0, "attention.scale": 0.25, "residual_scale": 0.5, "logit_scale": 4.0},
        )
    ],
    "olmo": [("olmo", {"clip_qkv": 1.5}, MHA | LAYER_NORM | {"attention.clamp_kqv": 1.5})],
    "olmo2": [("olmo2", {"num_key_value_heads": 2, "rms_norm_eps": 1e-6}, {})],
    "smollm3": [("smollm3", {"num_key_value_heads": 2, "num_hidden_layers": 3}, {"rope.freq_base": 2e6})],
    "gemma": [("gemma", {"num_key_value_heads": 2, "head_dim": 16}, {"attention.key_length": 16})],
    "gemma2": [
        (
            "gemma2",
            GEMMA,
            {
                "attention.key_length": 16,
                "attention.sliding_window": 8,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
        )
    ],
    "gemma3": [
        (
            "gemma3_text",
            GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            {
                "attention.key_length": 16,
                "attention.sliding_window": 8,
                "attention.sliding_window_pattern": 2,
                "rope.freq_base": 1e6,
            },
        )
    ],
    "command-r": [
        (
            "cohere",
            {"num_key_value_heads": 2, "logit_scale": 0.25, "use_qk_norm": True},
            LAYER_NORM | {"logit_scale": 0.25, "rope.freq_base": 5e5},
        )
    ],
    "stablelm": [
        (
            "stablelm",
            {"num_key_value_heads": 2, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
            LAYER_NORM | {"rope.dimension_count": 4},
        ),
        (
            "stablelm",
            {
                "num_key_value_heads": 2,
                "use_parallel_residual": True,
                "qk_layernorm": True,
                "partial_rotary_factor": 0.5,
            },
            LAYER_NORM | {"rope.dimension_count": 4},
        ),
    ],
    "starcoder2": [("starcoder2", {"num_key_value_heads": 2}, LAYER_NORM)],
    "phi2": [("phi", {}, MHA | LAYER_NORM | {"rope.dimension_count": 4})],
    "phi3": [
        (
            "phi3",
            {"num_key_value_heads": 2, "sliding_window": 8, "rms_norm_eps": 1e-6},
            {"attention.sliding_window": 8},
        ),
        (
            "phi3",
            {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "rms_norm_eps": 1e-6},
            MHA
            | {
                "rope.scaling.attn_factor": 1.25,
                "rope.scaling.original_context_length": 16,
            },
        ),
    ],
    "gpt2": [("gpt2", {}, MHA | WIDE | LAYER_NORM), ("gpt2", {"tie_word_embeddings": False}, MHA | WIDE | LAYER_NORM)],
    "starcoder": [("gpt_bigcode", {"n_inner": 48}, LAYER_NORM | {"attention.head_count_kv": 1})],
    "bloom": [("bloom", {"seq_length": 64}, MHA | WIDE | LAYER_NORM)],
    "mpt": [
        (
            "mpt",
            {"attn_config": {"clip_qkv": 1.5}, "max_seq_len": 64},
            MHA | WIDE | LAYER_NORM | {"attention.clamp_kqv": 1.5, "attention.max_alibi_bias": 8.0},
        )
    ],
    "gptneox": [
        (
            "gpt_neox",
            {"rotary_pct": 0.5, "use_parallel_residual": parallel},
            MHA | LAYER_NORM | {"rope.dimension_count": 4, "use_parallel_residual": parallel},
        )
        for parallel in (True, False)
    ],
    "falcon": [
        ("falcon", {"ffn_hidden_size": 48}, LAYER_NORM | {"attention.head_count_kv": 1}),
        (
            "falcon",
            {"ffn_hidden_size": 48, "new_decoder_architecture": True, "num_kv_heads": 2},
            LAYER_NORM,
        ),
    ],
    "bert": [("bert", {}, MHA | LAYER_NORM | {"attention.layer_norm_epsilon": 1e-12})],
}
for cases in (SPARSE, FURTHER, HYBRIDS):
    MODELS |= {arch: MODELS.get(arch, []) + models for arch, models in cases.items()}
