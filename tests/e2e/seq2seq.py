"""The tiny encoder-decoders of the table test; `families` has the other rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from .families import LENGTH, VOCAB, Row, randomized

SOURCE = 11  # tokens of the longest source
OLD = "past_key_values" in transformers.modeling_outputs.Seq2SeqLMOutput.__dataclass_fields__
CACHE = "past_key_values" if OLD else "cache"  # from transformers 5.24 on

T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 40,
    "num_layers": 3,
    "num_decoder_layers": 2,  # the caches of transformers are as many as the encoder has layers
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}
GLOBAL = {"encoder_attention_type": "transient-global", "local_radius": 3, "global_block_size": 4, "num_layers": 2}
SWITCH = T5 | {
    "num_layers": 5,
    "num_decoder_layers": 4,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "num_experts": 4,
}
BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}

LED = {k: v for k, v in BART.items() if k != "max_position_embeddings"} | {
    "max_encoder_position_embeddings": 64,
    "max_decoder_position_embeddings": 32,
    "attention_window": [4, 6],
}
T5GEMMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 3.0,
}


@dataclass(frozen=True)
class Seq2Seq(Row):
    """`untied`: the head is not the embedding, though transformers' configs cannot say so any more; `sinusoids`: the
    checkpoint's positions are sinusoids and stay so."""

    untied: bool = False
    sinusoids: bool = False

    @property
    def is_encoder(self) -> bool:
        return False

    def save(self, folder: Path, **options: Any) -> torch.nn.Module:
        kind: Any = getattr(transformers, self.model)
        config = kind.config_class(**self.config)
        config._attn_implementation = "eager"
        model = kind(config)
        if self.untied:
            model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        positions = {k: v.clone() for k, v in model.state_dict().items() if self.sinusoids and "embed_positions" in k}
        made = randomized(model)
        made.load_state_dict(positions, strict=False)
        model.save_pretrained(folder, max_shard_size="100KB")
        return made


VARIED: dict[str, Seq2Seq] = {
    "t5": Seq2Seq("T5ForConditionalGeneration", T5),
    "t5-v1.1": Seq2Seq(
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        untied=True,
    ),
    "t5-silu": Seq2Seq("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-silu", "d_kv": 8}),
    "mt5": Seq2Seq("MT5ForConditionalGeneration", T5),
    "umt5": Seq2Seq("UMT5ForConditionalGeneration", T5),
    "switch": Seq2Seq("SwitchTransformersForConditionalGeneration", SWITCH | {"expert_capacity": 64}),
    "switch-overflow": Seq2Seq(
        "SwitchTransformersForConditionalGeneration",
        SWITCH | {"expert_capacity": 3, "router_bias": True, "num_sparse_decoder_layers": 4},
    ),
    "bart": Seq2Seq("BartForConditionalGeneration", BART),
    "bart-scaled": Seq2Seq(
        "BartForConditionalGeneration", BART | {"scale_embedding": True, "activation_function": "relu"}, untied=True
    ),
    "mbart": Seq2Seq("MBartForConditionalGeneration", BART | {"scale_embedding": True}),
    "marian": Seq2Seq(
        "MarianMTModel", BART | {"decoder_vocab_size": VOCAB, "activation_function": "swish"}, sinusoids=True
    ),
    "pegasus": Seq2Seq("PegasusForConditionalGeneration", BART | {"scale_embedding": True}, sinusoids=True),
    "blenderbot-small": Seq2Seq("BlenderbotSmallForConditionalGeneration", BART),
    "m2m_100": Seq2Seq("M2M100ForConditionalGeneration", BART),
    "led": Seq2Seq("LEDForConditionalGeneration", LED),
    "t5gemma": Seq2Seq(
        "T5GemmaForConditionalGeneration",
        {
            "encoder": T5GEMMA | {"hidden_size": 48, "num_hidden_layers": 2},
            "decoder": T5GEMMA | {"final_logit_softcapping": 5.0},
            "vocab_size": VOCAB,
            "decoder_start_token_id": 2,
        },
    ),
    "longt5": Seq2Seq("LongT5ForConditionalGeneration", T5 | {"local_radius": 3, "feed_forward_proj": "gated-gelu"}),
    "longt5-global": Seq2Seq("LongT5ForConditionalGeneration", T5 | GLOBAL),
}
ALIKE: dict[str, Seq2Seq] = {  # in the table test, not in the zoo
    "pegasus-other-positions": Seq2Seq("PegasusForConditionalGeneration", BART),
    "plbart": Seq2Seq("PLBartForConditionalGeneration", BART),
    "mvp": Seq2Seq("MvpForConditionalGeneration", BART | {"use_prompt": False}),
    "blenderbot": Seq2Seq("BlenderbotForConditionalGeneration", BART | {"scale_embedding": True}),
    "m2m_100-unscaled": Seq2Seq("M2M100ForConditionalGeneration", BART | {"scale_embedding": False, "d_model": 24}),
    "t5-other-activation": Seq2Seq("T5ForConditionalGeneration", T5 | {"dense_act_fn": "silu"}),
}
SEQ2SEQ = VARIED | ALIKE


def pairs(row: Seq2Seq) -> dict[str, np.ndarray]:
    """Three sources of unequal lengths, padded, and as many answers."""
    rng = np.random.default_rng(1)
    mask = (np.arange(SOURCE) < [[SOURCE], [6], [1]]).astype(np.int64)
    ids = np.where(mask, rng.integers(3, VOCAB, mask.shape), row.config.get("pad_token_id", 0))
    answers = rng.integers(3, VOCAB, (len(mask), LENGTH))
    return {"encoder_input_ids": ids, "encoder_attention_mask": mask, "input_ids": answers}


def answered(model: torch.nn.Module, inputs: dict[str, np.ndarray], chunk: int) -> np.ndarray:
    """Logits [batch, seq, vocab] of the answers in transformers, `chunk` tokens at a time."""
    net: Any = model
    ids, mask, answers = (torch.from_numpy(array) for array in inputs.values())
    cache, found = None, []
    with torch.inference_mode():
        encoded = net.get_encoder()(input_ids=ids, attention_mask=mask)
        for part in answers.split(chunk, 1):
            made = net(
                encoder_outputs=encoded,
                attention_mask=mask,
                decoder_input_ids=part,
                **{CACHE: cache},
                use_cache=True,
            )
            cache = made[CACHE]
            found.append(made.logits.numpy())
    return np.concatenate(found, 1)
