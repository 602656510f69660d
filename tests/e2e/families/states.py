"""State spaces and their hybrids."""

from __future__ import annotations

from .row import Row
from .sizes import COMMON, GQA, GRANITE, HEADED, HYBRID, MHA, STATES, TIED, TOP2, UNTIED

ROWS = {
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
}
