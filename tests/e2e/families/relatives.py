"""Relatives of Llama with a difference or two."""

from __future__ import annotations

from .row import Row
from .sizes import BORDER, COMMON, GQA, GRANITE, LOCAL_GLOBAL, MHA, ROPES, TIED, UNTIED, WINDOW

FOUR = {"num_hidden_layers": 4}
BIASED = {"attention_bias": True, "mlp_bias": True}
H16 = {"head_dim": 16}

ROWS = {
    "apertus": Row("ApertusForCausalLM", COMMON | GQA | UNTIED),
    "glm4": Row("Glm4ForCausalLM", COMMON | GQA | UNTIED | H16),
    "nanochat": Row("NanoChatForCausalLM", COMMON | GQA | UNTIED),
    "ministral3": Row(
        "Ministral3ForCausalLM",
        COMMON
        | GQA
        | UNTIED
        | H16
        | {"rope_parameters": ROPES["yarn"] | {"llama_4_scaling_beta": 0.3} | BORDER, "sliding_window": WINDOW},
    ),
    "exaone4": Row("Exaone4ForCausalLM", COMMON | GQA | UNTIED | FOUR | {"sliding_window": WINDOW}),
    "doge": Row("DogeForCausalLM", COMMON | GQA | UNTIED | {"sliding_window": WINDOW}),
    "bitnet": Row("BitNetForCausalLM", COMMON | GQA | UNTIED),
    "nemotron": Row("NemotronForCausalLM", COMMON | GQA | UNTIED),
    "granite_swa": Row(
        "GraniteSWAForCausalLM",
        COMMON | GQA | TIED | GRANITE | {"sliding_window": WINDOW, "layer_rope_theta": [100.0, 0, 5000.0]},
    ),
    "cohere2": Row("Cohere2ForCausalLM", COMMON | GQA | TIED | FOUR | {"sliding_window": WINDOW}),
}
ALIKE = {
    "arcee": Row("ArceeForCausalLM", COMMON | GQA | UNTIED),
    "arcee-biases": Row("ArceeForCausalLM", COMMON | MHA | TIED | BIASED),
    "apertus-silu": Row("ApertusForCausalLM", COMMON | MHA | TIED | {"hidden_act": "silu", "attention_bias": True}),
    "seed_oss": Row("SeedOssForCausalLM", COMMON | GQA | UNTIED | H16),
    "seed_oss-out-bias": Row("SeedOssForCausalLM", COMMON | MHA | TIED | H16 | {"attention_out_bias": True}),
    "helium": Row("HeliumForCausalLM", COMMON | GQA | UNTIED | H16 | {"attention_bias": True}),
    "glm": Row("GlmForCausalLM", COMMON | GQA | UNTIED | H16),
    "glm-whole-heads": Row(
        "GlmForCausalLM", COMMON | MHA | TIED | H16 | {"partial_rotary_factor": 1.0, "attention_bias": False}
    ),
    "nanochat-biases": Row(
        "NanoChatForCausalLM", COMMON | MHA | UNTIED | {"attention_bias": True, "final_logit_softcapping": None}
    ),
    "ministral": Row("MinistralForCausalLM", COMMON | GQA | UNTIED | H16 | {"sliding_window": WINDOW}),
    "ministral-mixed": Row(
        "MinistralForCausalLM", COMMON | MHA | TIED | H16 | {"sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL}
    ),
    "exaone4-global": Row(
        "Exaone4ForCausalLM",
        COMMON | MHA | TIED | {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "olmo3": Row("Olmo3ForCausalLM", COMMON | GQA | UNTIED | FOUR | {"sliding_window": WINDOW}),
    "olmo3-yarn": Row(
        "Olmo3ForCausalLM",
        COMMON
        | MHA
        | TIED
        | {"sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL, "attention_bias": True}
        | {
            "rope_parameters": {
                "full_attention": ROPES["yarn"] | {"rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "hunyuan": Row("HunYuanDenseV1ForCausalLM", COMMON | GQA | UNTIED | H16),
    "hunyuan-alpha": Row(
        "HunYuanDenseV1ForCausalLM",
        COMMON
        | MHA
        | TIED
        | H16
        | {"attention_bias": True, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "ernie4_5": Row("Ernie4_5ForCausalLM", COMMON | GQA | TIED | H16),
    "ernie4_5-biases": Row("Ernie4_5ForCausalLM", COMMON | MHA | UNTIED | H16 | {"use_bias": True}),
    "nemotron-biases": Row("NemotronForCausalLM", COMMON | MHA | TIED | BIASED | {"partial_rotary_factor": 0.25}),
    "doge-biases": Row("DogeForCausalLM", COMMON | MHA | TIED | BIASED),
    "cwm": Row("CwmForCausalLM", COMMON | GQA | UNTIED | H16 | {"sliding_window": WINDOW}),
    "internlm3": Row("LlamaForCausalLM", COMMON | GQA | UNTIED | H16 | BIASED, configuration="InternLM3Config"),
    "iquestcoder": Row("LlamaForCausalLM", COMMON | GQA | UNTIED | H16, configuration="IQuestCoderConfig"),
    "hyperclovax": Row("HyperCLOVAXForCausalLM", COMMON | GQA | UNTIED | GRANITE),
    "hyperclovax-pre": Row("HyperCLOVAXForCausalLM", COMMON | MHA | TIED | {"use_post_norm": False}),
    "cohere2-biases": Row(
        "Cohere2ForCausalLM",
        COMMON | MHA | UNTIED | {"sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL, "attention_bias": True},
    ),
}
