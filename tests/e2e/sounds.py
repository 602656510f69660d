"""The tiny models that read sound of the table test: encoders, and encoder-decoders that write what is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .families import LENGTH, VOCAB, Row
from .seq2seq import CACHE, Seq2Seq

WAV2VEC2: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": [12, 12, 16],
    "conv_kernel": [5, 3, 2],
    "conv_stride": [3, 2, 2],
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
}
STABLE = WAV2VEC2 | {
    "do_stable_layer_norm": True,
    "feat_extract_norm": "layer",
    "conv_bias": True,
    "num_conv_pos_embeddings": 5,
}
WHISPER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_mel_bins": 6,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "max_source_positions": 9,
    "max_target_positions": 40,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
MOONSHINE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 3,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "max_position_embeddings": 40,
    "decoder_start_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SOUNDS: dict[str, Row] = {
    "wav2vec2": Row("Wav2Vec2Model", WAV2VEC2),
    "wav2vec2-stable": Row("Wav2Vec2Model", STABLE),
    "wav2vec2-layer-norms": Row(
        "Wav2Vec2Model",
        WAV2VEC2 | {"feat_extract_norm": "layer", "feat_extract_activation": "relu", "hidden_act": "silu"},
    ),
    "hubert": Row("HubertModel", WAV2VEC2),
    "hubert-stable": Row("HubertModel", STABLE | {"feat_proj_layer_norm": False, "num_conv_pos_embedding_groups": 1}),
}
SPEECH: dict[str, Seq2Seq] = {
    "whisper": Seq2Seq("WhisperForConditionalGeneration", WHISPER),
    "whisper-untied": Seq2Seq(
        "WhisperForConditionalGeneration",
        WHISPER | {"tie_word_embeddings": False, "scale_embedding": True, "activation_function": "relu"},
    ),
    "moonshine": Seq2Seq("MoonshineForConditionalGeneration", MOONSHINE),
    "moonshine-biases": Seq2Seq(
        "MoonshineForConditionalGeneration",
        MOONSHINE
        | {"attention_bias": True, "encoder_hidden_act": "relu", "decoder_hidden_act": "gelu"}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
}
BINS, FRAMES = WHISPER["num_mel_bins"], 2 * WHISPER["max_source_positions"]


def waveforms(*lengths: int) -> tuple[np.ndarray, np.ndarray]:
    """Waveforms of `lengths` samples, padded on the right, and the mask of what is no padding."""
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    noise = np.random.default_rng(1).standard_normal(mask.shape)
    return (noise * mask).astype(np.float32), mask


def said(row: Seq2Seq) -> dict[str, np.ndarray]:
    """Three sounds, and as many answers: the inputs of a model by name."""
    rng = np.random.default_rng(1)
    answers = {"input_ids": rng.integers(3, VOCAB, (3, LENGTH))}
    if row.family == "whisper":
        return {"input_features": rng.standard_normal((3, BINS, FRAMES)).astype(np.float32), **answers}
    sound, mask = waveforms(3000, 2000, 900)
    return {"input_values": sound, "encoder_attention_mask": mask, **answers}


def heard(inputs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The inputs of the encoder, as transformers calls them."""
    theirs = {"encoder_attention_mask": "attention_mask"}
    return {theirs.get(name, name): torch.from_numpy(a) for name, a in inputs.items() if name != "input_ids"}


def written(model: torch.nn.Module, inputs: dict[str, np.ndarray], chunk: int) -> np.ndarray:
    """Logits [batch, seq, vocab] of the answers in transformers, `chunk` tokens at a time."""
    net: Any = model
    cache, found = None, []
    with torch.inference_mode():
        encoded = net.get_encoder()(**heard(inputs))
        for part in torch.from_numpy(inputs["input_ids"]).split(chunk, 1):
            made = net(encoder_outputs=encoded, decoder_input_ids=part, use_cache=True, **{CACHE: cache})
            cache = made[CACHE]
            found.append(made.logits.numpy())
    return np.concatenate(found, 1)
