"""Models of linear recurrences."""

from __future__ import annotations

from .row import Row
from .sizes import COMMON, GQA, MHA, TIED, TOP2, UNTIED, WINDOW

SCALES = {
    f"{kind}_{name}_factor": 0.6 + 0.1 * i
    for i, (kind, name) in enumerate((k, n) for k in ("full_attn", "linear_attn", "mlp") for n in ("alpha", "beta"))
}
DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
GRIFFIN = {"attention_window_size": WINDOW, "rms_norm_eps": 1e-5}
XLSTM = {"num_heads": 2, "chunk_size": 8, "autocast_kernel_dtype": "float32", "ffn_round_up_to_multiple_of": 16}
ROWS = {
    "minimax": Row(
        "MiniMaxForCausalLM",
        COMMON | GQA | UNTIED | TOP2 | SCALES | {"num_local_experts": 4, "block_size": 5},
        fixed=DECAYS,
    ),
    "minimax-window": Row(
        "MiniMaxForCausalLM",
        COMMON
        | MHA
        | TIED
        | TOP2
        | {"num_local_experts": 4, "sliding_window": WINDOW, "head_dim": 12, "num_attention_heads": 3}
        | {"num_key_value_heads": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        fixed=DECAYS,
    ),
    "recurrent-gemma": Row("RecurrentGemmaForCausalLM", COMMON | {"num_key_value_heads": 1} | TIED | GRIFFIN),
    "recurrent-gemma-wide": Row(
        "RecurrentGemmaForCausalLM",
        COMMON
        | MHA
        | UNTIED
        | GRIFFIN
        | {"lru_width": 80, "conv1d_width": 3, "attention_bias": True, "block_types": ["attention", "recurrent"]},
    ),
    "rwkv": Row("RwkvForCausalLM", COMMON | UNTIED | {"context_length": 64}),
    "rwkv-narrow": Row(
        "RwkvForCausalLM",
        COMMON | TIED | {"context_length": 64, "attention_hidden_size": 48, "intermediate_size": None},
    ),
    # What the kernels of transformers would round to bfloat16 stays float32.
    "xlstm": Row("xLSTMForCausalLM", COMMON | TIED | XLSTM),
    "xlstm-narrow": Row(
        "xLSTMForCausalLM",
        COMMON | UNTIED | XLSTM | {"num_heads": 4, "qk_dim_factor": 0.25, "v_dim_factor": 0.75, "gate_soft_cap": 2.0},
    ),
}
