"""Gemma."""

from __future__ import annotations

from .row import Row
from .sizes import COMMON, GQA, LOCAL_GLOBAL, MHA, TIED, UNTIED, WINDOW

GEMMA2 = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
}

ROWS = {
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
}
ALIKE = {
    "vaultgemma": Row("VaultGemmaForCausalLM", COMMON | GQA | TIED | GEMMA2),
    "vaultgemma-uncapped": Row("VaultGemmaForCausalLM", COMMON | MHA | UNTIED | GEMMA2 | UNCAPPED),
}
