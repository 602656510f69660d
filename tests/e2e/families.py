"""The tiny models of the table test: a row says the transformers class, its config, and how its reference runs.

Every family has rows for each arrangement its configs can ask for. All parameters are drawn anew: vectors (norms,
biases, sinks) around their initial values, matrices (routers too) with a deviation of 0.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

LENGTH, WINDOW, VOCAB = 24, 8, 96

# What most configs call their sizes.
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# The names of GPT-2's time.
CLASSIC = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA, MHA = {"num_key_value_heads": 2}, {"num_key_value_heads": 4}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}
GPT_NEO = {k: COMMON[k] for k in ("vocab_size", "hidden_size", "max_position_embeddings")} | {
    "num_layers": 3,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1], [["local"], 1]],
    "window_size": WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MPT = {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "vocab_size": VOCAB}
# Scalings from a context of 16 to the length of the texts and beyond.
BORDER = {"original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **BORDER},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **BORDER},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
        "factor": 4.0,
        **BORDER,
    },
}
LOCAL_GLOBAL = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA2 = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
}

TOP2 = {"num_experts_per_tok": 2}
QWEN_MOE = TOP2 | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
# Of four layers the second and the fourth could be sparse, but the second is not.
ALTERNATING = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": True}
DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "rope_parameters": ROPES["yarn"] | {"mscale": 0.9, "mscale_all_dim": 0.6},
}
STATES = {
    **{k: COMMON[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers")},
    **{k: COMMON[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
    "state_size": 8,
}
# Bamba and Mamba-2: 8 heads of 16 channels, chunks shorter than the texts.
HEADED = {"num_heads": 8, "head_dim": 16, "chunk_size": 8}
HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
PARALLEL = {
    "mamba_n_heads": 8,
    "mamba_d_ssm": 64,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 0.7,
    "attention_out_multiplier": 1.3,
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
    "mlp_multipliers": [0.8, 1.6],
}
LFM2_MOE = TOP2 | {
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention", "conv"],
}
NEMOTRON = TOP2 | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "head_dim": 16,
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}


@dataclass(frozen=True)
class Row:
    """A tiny model: `model` is a class of transformers, `config` the arguments of its config.

    `attention` is transformers' implementation; its eager Falcon adds ALiBi twice.
    """

    model: str
    config: dict[str, Any]
    attention: str = "eager"

    @property
    def family(self) -> str:
        """The model_type."""
        return str(getattr(transformers, self.model).config_class.model_type)

    @property
    def is_decoder(self) -> bool:
        """Check that the model predicts the next token."""
        return self.model.endswith(("ForCausalLM", "LMHeadModel"))

    @property
    def is_encoder(self) -> bool:
        """Check that the model gives every token a vector."""
        return self.model.endswith("Model") and not self.is_decoder

    def save(self, folder: Path, **options: Any) -> torch.nn.Module:
        """The model, its parameters drawn anew, also written to `folder` as a checkpoint in several files."""
        kind = getattr(transformers, self.model)
        config = kind.config_class(**self.config)
        config._attn_implementation = self.attention
        model = randomized(kind(config, **options))
        model.save_pretrained(folder, max_shard_size="100KB")
        return model


ROWS: dict[str, Row] = {
    "llama-gqa-tied": Row("LlamaForCausalLM", COMMON | GQA | TIED),
    "llama-mha-biases": Row("LlamaForCausalLM", COMMON | MHA | UNTIED | {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-head": Row("LlamaForCausalLM", COMMON | GQA | UNTIED | {"head_dim": 12}),
    "mistral-gqa": Row("MistralForCausalLM", COMMON | GQA | UNTIED | {"sliding_window": WINDOW, "head_dim": 16}),
    "mistral-tied": Row("MistralForCausalLM", COMMON | MHA | TIED | {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2-gqa-tied": Row("Qwen2ForCausalLM", COMMON | GQA | TIED),
    "qwen2-window-mha": Row("Qwen2ForCausalLM", COMMON | MHA | UNTIED | SLIDING),
    "qwen3-gqa": Row("Qwen3ForCausalLM", COMMON | GQA | UNTIED | {"head_dim": 32}),
    "qwen3-window": Row("Qwen3ForCausalLM", COMMON | MHA | TIED | SLIDING | {"head_dim": 16, "attention_bias": True}),
    "olmo2-gqa": Row("Olmo2ForCausalLM", COMMON | GQA | UNTIED),
    "olmo": Row("OlmoForCausalLM", COMMON | GQA | UNTIED),
    "olmo-clipped": Row("OlmoForCausalLM", COMMON | MHA | TIED | {"clip_qkv": 1.0, "attention_bias": True}),
    "granite": Row("GraniteForCausalLM", COMMON | GQA | TIED | GRANITE),
    "granite-biases": Row("GraniteForCausalLM", COMMON | MHA | UNTIED | {"attention_bias": True, "mlp_bias": True}),
    "smollm3": Row("SmolLM3ForCausalLM", COMMON | GQA | TIED | {"no_rope_layer_interval": 2}),
    "smollm3-window": Row(
        "SmolLM3ForCausalLM",
        COMMON | MHA | UNTIED | {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "phi3": Row("Phi3ForCausalLM", COMMON | GQA | UNTIED | {"sliding_window": WINDOW}),
    "phi3-longrope": Row(
        "Phi3ForCausalLM",
        COMMON | MHA | TIED | BORDER | {"rope_parameters": ROPES["longrope"]},
    ),
    "starcoder2": Row("Starcoder2ForCausalLM", COMMON | GQA | TIED | {"sliding_window": WINDOW}),
    "starcoder2-plain": Row("Starcoder2ForCausalLM", COMMON | MHA | UNTIED | {"use_bias": False}),
    "stablelm": Row("StableLmForCausalLM", COMMON | GQA | UNTIED | {"use_qkv_bias": True}),
    "stablelm-parallel": Row(
        "StableLmForCausalLM", COMMON | GQA | TIED | {"use_parallel_residual": True, "qk_layernorm": True}
    ),
    "cohere": Row("CohereForCausalLM", COMMON | GQA | TIED),
    "cohere-norms": Row("CohereForCausalLM", COMMON | GQA | UNTIED | {"use_qk_norm": True, "attention_bias": True}),
    "gemma": Row("GemmaForCausalLM", COMMON | GQA | TIED | {"head_dim": 32}),
    "gemma2": Row("Gemma2ForCausalLM", COMMON | GQA | TIED | GEMMA2),
    "gemma2-uncapped": Row("Gemma2ForCausalLM", COMMON | MHA | UNTIED | GEMMA2 | UNCAPPED),
    "gemma3": Row("Gemma3ForCausalLM", COMMON | GQA | TIED | GEMMA2 | {"sliding_window_pattern": 2}),
    "gemma3-caps": Row(
        "Gemma3ForCausalLM",
        COMMON | GQA | TIED | GEMMA2 | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0},
    ),
    "gemma3-linear": Row(
        "Gemma3ForCausalLM",
        COMMON | MHA | UNTIED | GEMMA2 | {"rope_parameters": GEMMA3_ROPES, "layer_types": LOCAL_GLOBAL},
    ),
    **{
        f"llama-{name}": Row(
            "LlamaForCausalLM",
            COMMON
            | GQA
            | UNTIED
            | {"rope_parameters": rope, "max_position_embeddings": 16 if name == "dynamic" else 64},
        )
        for name, rope in ROPES.items()
    },
    "gpt_neo": Row("GPTNeoForCausalLM", GPT_NEO),
    "gptj": Row("GPTJForCausalLM", CLASSIC | {"rotary_dim": 8}),
    "gptj-tied": Row("GPTJForCausalLM", CLASSIC | TIED | {"rotary_dim": 16, "n_inner": 80}),
    "gpt_neox": Row("GPTNeoXForCausalLM", COMMON | UNTIED | {"rotary_pct": 0.5}),
    "gpt_neox-sequential": Row(
        "GPTNeoXForCausalLM", COMMON | TIED | {"use_parallel_residual": False, "attention_bias": False}
    ),
    "phi": Row("PhiForCausalLM", COMMON | GQA | UNTIED),
    "phi-norms": Row("PhiForCausalLM", COMMON | MHA | TIED | {"qk_layernorm": True, "partial_rotary_factor": 0.25}),
    "gpt_bigcode": Row("GPTBigCodeForCausalLM", CLASSIC),
    "gpt_bigcode-mha": Row("GPTBigCodeForCausalLM", CLASSIC | UNTIED | {"multi_query": False, "n_inner": 80}),
    "opt": Row("OPTForCausalLM", COMMON | {"ffn_dim": 80}),
    "opt-post": Row("OPTForCausalLM", COMMON | UNTIED | {"ffn_dim": 80, "do_layer_norm_before": False}),
    "bloom": Row("BloomForCausalLM", CLASSIC | {"hidden_size": 64}),
    "bloom-six-heads": Row("BloomForCausalLM", CLASSIC | {"hidden_size": 96, "n_head": 6}),
    "falcon-mqa": Row("FalconForCausalLM", COMMON | {"multi_query": True}),
    "falcon-sequential": Row(
        "FalconForCausalLM",
        COMMON | {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
        "sdpa",
    ),
    "falcon-gqa": Row("FalconForCausalLM", COMMON | UNTIED | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-one-norm": Row(
        "FalconForCausalLM",
        COMMON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "mpt": Row("MptForCausalLM", MPT),
    "mpt-clipped": Row("MptForCausalLM", MPT | {"attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.2}}),
    "gpt2-tied": Row("GPT2LMHeadModel", CLASSIC),
    "gpt2-untied": Row("GPT2LMHeadModel", CLASSIC | UNTIED),
    "mixtral": Row("MixtralForCausalLM", COMMON | GQA | UNTIED | TOP2 | {"num_local_experts": 4}),
    "mixtral-window-tied": Row(
        "MixtralForCausalLM", COMMON | MHA | TIED | TOP2 | {"num_local_experts": 4, "sliding_window": WINDOW}
    ),
    "qwen2-moe": Row("Qwen2MoeForCausalLM", COMMON | GQA | UNTIED | QWEN_MOE),
    "qwen2-moe-mixed": Row(
        "Qwen2MoeForCausalLM",
        COMMON | MHA | TIED | QWEN_MOE | SLIDING | ALTERNATING | {"max_window_layers": 3, "qkv_bias": False},
    ),
    "qwen3-moe": Row("Qwen3MoeForCausalLM", COMMON | GQA | UNTIED | QWEN_MOE | {"head_dim": 32}),
    "qwen3-moe-mixed": Row(
        "Qwen3MoeForCausalLM", COMMON | MHA | TIED | QWEN_MOE | SLIDING | ALTERNATING | {"attention_bias": True}
    ),
    "olmoe": Row("OlmoeForCausalLM", COMMON | GQA | UNTIED | TOP2 | {"num_experts": 4}),
    "granitemoe": Row("GraniteMoeForCausalLM", COMMON | GQA | UNTIED | TOP2 | GRANITE | {"num_local_experts": 4}),
    "gpt-oss": Row(
        "GptOssForCausalLM",
        COMMON
        | GQA
        | UNTIED
        | TOP2
        | {"num_local_experts": 4, "head_dim": 16, "sliding_window": WINDOW}
        # a limit that numbers of this size exceed
        | {"swiglu_limit": 0.5, "rope_parameters": ROPES["yarn"] | {"rope_theta": 150_000.0, "truncate": False}},
    ),
    "deepseek-v2-lite": Row("DeepseekV2ForCausalLM", COMMON | MHA | UNTIED | DEEPSEEK | {"q_lora_rank": None}),
    "deepseek-v2-groups": Row(
        "DeepseekV2ForCausalLM",
        COMMON
        | MHA
        | UNTIED
        | DEEPSEEK
        | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "mlp_bias": True}
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    ),
    "deepseek-v3": Row(
        "DeepseekV3ForCausalLM",
        COMMON | MHA | UNTIED | DEEPSEEK | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3-halves": Row(
        "DeepseekV3ForCausalLM",
        COMMON
        | MHA
        | TIED
        | DEEPSEEK
        | {"q_lora_rank": None, "n_group": 2, "topk_group": 1}
        | {"norm_topk_prob": False, "rope_interleave": False, "rope_parameters": None},
    ),
    "mamba": Row("MambaForCausalLM", STATES),
    "mamba-biases": Row(
        "MambaForCausalLM",
        STATES
        | UNTIED
        | {"use_bias": True, "use_conv_bias": False, "expand": 1, "conv_kernel": 3, "time_step_rank": 5},
    ),
    "falcon-mamba": Row("FalconMambaForCausalLM", STATES),
    "mamba2": Row("Mamba2ForCausalLM", STATES | HEADED | {"n_groups": 2}),
    "mamba2-biases": Row(
        "Mamba2ForCausalLM", STATES | HEADED | TIED | {"n_groups": 1, "use_bias": True, "use_conv_bias": False}
    ),
    "jamba": Row(
        "JambaForCausalLM",
        COMMON
        | GQA
        | UNTIED
        | TOP2
        | {"num_hidden_layers": 4, "num_experts": 4, "mamba_d_state": 8}
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 3, "expert_layer_offset": 1},
    ),
    "granite-hybrid": Row(
        "GraniteMoeHybridForCausalLM",
        COMMON
        | GQA
        | UNTIED
        | TOP2
        | GRANITE
        | HYBRID
        | {"num_local_experts": 4, "shared_intermediate_size": 48, "layer_types": ["mamba", "attention", "mamba"]},
    ),
    "granite-hybrid-dense": Row(
        "GraniteMoeHybridForCausalLM",
        COMMON
        | MHA
        | TIED
        | GRANITE
        | HYBRID
        | {"num_local_experts": 0, "shared_intermediate_size": 48}
        | {"position_embedding_type": "rope", "layer_types": ["attention", "mamba", "mamba"]},
    ),
    "bamba": Row("BambaForCausalLM", COMMON | GQA | UNTIED | HYBRID | {"mamba_n_groups": 2, "attn_layer_indices": [1]}),
    "lfm2": Row(
        "Lfm2ForCausalLM", COMMON | GQA | TIED | {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}
    ),
    "lfm2-plain": Row(
        "Lfm2ForCausalLM",
        COMMON | MHA | UNTIED | {"full_attn_idxs": [2], "block_auto_adjust_ff_dim": False, "conv_L_cache": 4},
    ),
    "lfm2-moe": Row("Lfm2MoeForCausalLM", COMMON | GQA | UNTIED | LFM2_MOE),
    "lfm2-moe-uncorrected": Row(
        "Lfm2MoeForCausalLM",
        COMMON
        | GQA
        | TIED
        | LFM2_MOE
        | {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    ),
    "falcon-h1": Row("FalconH1ForCausalLM", COMMON | GQA | UNTIED | PARALLEL | MULTIPLIERS | {"mamba_n_groups": 2}),
    "falcon-h1-norms": Row(
        "FalconH1ForCausalLM",
        COMMON
        | MHA
        | TIED
        | PARALLEL
        | MULTIPLIERS
        | {"mamba_rms_norm": True, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}
        | {"projectors_bias": True, "mamba_n_groups": 2},
    ),
    "falcon-h1-gated-norms": Row(
        "FalconH1ForCausalLM",
        COMMON | GQA | UNTIED | PARALLEL | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron-h": Row("NemotronHForCausalLM", COMMON | GQA | UNTIED | NEMOTRON),
    "nemotron-h-latent": Row(
        "NemotronHForCausalLM",
        COMMON
        | MHA
        | TIED
        | NEMOTRON
        | {"moe_latent_size": 24, "use_bias": True, "norm_topk_prob": False}
        | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
    ),
    "bert": Row("BertModel", COMMON | {"type_vocab_size": 2, "hidden_act": "gelu"}),
    "roberta": Row("RobertaModel", COMMON | {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": Row("XLMRobertaModel", COMMON | {"type_vocab_size": 1, "pad_token_id": 1}),
    "albert": Row("AlbertModel", COMMON | {"type_vocab_size": 2, "embedding_size": 24}),
    "albert-groups": Row(
        "AlbertModel",
        COMMON | {"type_vocab_size": 2, "embedding_size": 64, "num_hidden_layers": 4, "num_hidden_groups": 2},
    ),
}


def randomized(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """`model`, its parameters and learned buffers drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.state_dict().values():
        if p.is_floating_point():
            noise = 0.2 * torch.randn(p.shape, generator=generator)
            p.copy_(p + noise if p.ndim == 1 else noise)
    return model.eval()


def reference(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """Logits [batch, seq, vocab] of token ids [batch, seq] in transformers."""
    with torch.inference_mode():
        return np.asarray(model(torch.from_numpy(ids), use_cache=False).logits.numpy())


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, relative to the largest value (at least 1)."""
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / max(1.0, np.abs(want).max()))
