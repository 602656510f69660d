"""GPT and what followed it."""

from __future__ import annotations

from .row import Row
from .sizes import CLASSIC, COMMON, GQA, MHA, TIED, UNTIED, VOCAB, WINDOW

GPT_NEO = {k: COMMON[k] for k in ("vocab_size", "hidden_size", "max_position_embeddings")} | {
    "num_layers": 3,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1], [["local"], 1]],
    "window_size": WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MPT = {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "vocab_size": VOCAB}

ROWS = {
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
}
ALIKE = {
    "gpt_neox_japanese": Row("GPTNeoXJapaneseForCausalLM", COMMON | TIED | {"intermediate_multiple_size": 2}),
    "gpt_neox_japanese-part": Row("GPTNeoXJapaneseForCausalLM", COMMON | UNTIED | {"rotary_pct": 0.5}),
}
