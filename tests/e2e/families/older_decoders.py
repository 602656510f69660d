"""Decoders before GPT-2, those with their positions, and encoder-decoders without an encoder."""

from __future__ import annotations

from .row import Row
from .sizes import CLASSIC, COMMON, TIED, UNTIED, VOCAB

DECODER = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
XGLM = {k: DECODER[k] for k in ("vocab_size", "d_model", "max_position_embeddings")} | {
    "num_layers": 3,
    "attention_heads": 4,
    "ffn_dim": 80,
}

ALONE = {
    f"{name.lower()}-alone": Row(f"{name}ForCausalLM", DECODER)
    for name in ("Bart", "MBart", "Marian", "Pegasus", "PLBart", "Mvp", "Blenderbot", "BlenderbotSmall")
}

ROWS = {
    "openai-gpt": Row("OpenAIGPTLMHeadModel", CLASSIC),
    "ctrl": Row("CTRLLMHeadModel", CLASSIC | {"dff": 80}),
    "xglm": Row("XGLMForCausalLM", XGLM),
    "blenderbotsmall-alone": ALONE["blenderbotsmall-alone"],
}
ALIKE = {
    "openai-gpt-silu": Row("OpenAIGPTLMHeadModel", CLASSIC | UNTIED | {"afn": "silu"}),
    "ctrl-untied": Row("CTRLLMHeadModel", CLASSIC | UNTIED | {"dff": 80}),
    "biogpt": Row("BioGptForCausalLM", COMMON | TIED),
    "biogpt-unscaled": Row("BioGptForCausalLM", COMMON | UNTIED | {"scale_embedding": False}),
    "xglm-unscaled": Row("XGLMForCausalLM", XGLM | UNTIED | {"scale_embedding": False}),
    **ALONE,
}
