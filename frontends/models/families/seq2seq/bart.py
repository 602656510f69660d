"""BART and its relatives: biases, LayerNorm, learned positions (mBART) or sinusoids (Marian, Pegasus, M2M-100).

A config without an encoder (BartForCausalLM) describes a decoder only.
"""

from __future__ import annotations

from typing import Any

from weft.ir.recipes import Recipe, Reshape

from ....dsl import Sinusoidal
from ...tables.family import BIASES, REQUIRED, Config, Family, Fetch, Names, Rule, key, set_all
from ...tables.settings import Settings
from ...task_heads import ENCODER_DECODER_HEADS


def _map_names(part: str) -> dict[str, str]:
    """Return the checkpoint names of the parameters of `part` (encoder or decoder)."""
    layer = f"{part}.layers.{{i}}"
    names = {
        f"{part}.positions.weight": f"{part}.embed_positions.weight",
        f"{part}.embed_norm": f"{part}.layernorm_embedding",
        f"{layer}.ffn.up": f"{layer}.fc1",
        f"{layer}.ffn.down": f"{layer}.fc2",
        f"{layer}.ffn_norm": f"{layer}.final_layer_norm",
        f"{part}.final_norm": f"{part}.layer_norm",
    }
    for ours, theirs in {"attn": "self_attn", "cross": "encoder_attn"}.items():
        names[f"{layer}.{ours}_norm"] = f"{layer}.{theirs}_layer_norm"
        for weight, name in {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}.items():
            names[f"{layer}.{ours}.{weight}"] = f"{layer}.{theirs}.{name}"
    return names


def _map_decoder_names(prefix: str) -> Names:
    """Return the checkpoint names of a decoder without an encoder, with the prefix `prefix`."""
    names = _map_names("decoder").items()
    return {ours.removeprefix("decoder."): prefix + theirs.removeprefix("decoder.") for ours, theirs in names}


def _flatten_logits_bias(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """Return the head's weight or bias; the checkpoint stores the bias as a matrix with one row."""
    return fetch("lm_head.weight") if part == "weight" else Reshape(fetch("final_logits_bias"), (-1,))


def _is_decoder_only(config: Config) -> bool:
    return config.get("is_encoder_decoder") is False


def _choose_size(name: str, encoder: Any = REQUIRED, decoder: Any = REQUIRED) -> Rule:
    """Return the rule for a size in the config key `name`, with {} replaced by encoder, or by decoder if the model has
    no encoder. `encoder` and `decoder` are the defaults of these two keys."""
    of = {True: key(name.format("decoder"), default=decoder), False: key(name.format("encoder"), default=encoder)}
    return lambda c: of[_is_decoder_only(c)](c)


def make_embedding_scale(default: bool, width: str = "d_model") -> Rule:
    """Return the rule for the factor of embeddings: √(key `width`) if scale_embedding (default `default`), else 1."""
    return lambda c: key(width)(c) ** 0.5 if c.get("scale_embedding", default) else 1.0


def _read_decoder(config: Config) -> dict[str, Any]:
    sizes = {"layers": "decoder_layers", "heads": "decoder_attention_heads", "ffn": "decoder_ffn_dim"}
    return {setting: key(name)(config) for setting, name in sizes.items()}


BART = Family(
    model_types=("bart",),
    settings={
        "kind": lambda c: "decoder" if _is_decoder_only(c) else "encoder-decoder",
        "vocab": key("vocab_size"),
        "dim": key("d_model"),
        "layers": _choose_size("{}_layers"),
        "heads": _choose_size("{}_attention_heads"),
        "ffn": _choose_size("{}_ffn_dim"),
        "context": key("max_position_embeddings"),
        "norm": "layer",
        "eps": 1e-5,
        "arrangement": "post",
        "activation": key("activation_function", default="gelu"),
        "gated": False,
        **set_all(True, *BIASES),
        "embed_scale": make_embedding_scale(False),
        "embed_norm": True,
        "learned_positions": key("max_position_embeddings"),
        "position_offset": 2,
        "decoder": _read_decoder,
    },
    names={
        "embed": "shared",
        **_map_names("encoder"),
        **_map_names("decoder"),
        "decoder.lm_head": _flatten_logits_bias,
        **_map_decoder_names("decoder."),
        "lm_head": "lm_head",
    },
    prefix="model.",
    tasks=ENCODER_DECODER_HEADS,
    from_keys={"tie": lambda keys: "lm_head.weight" not in keys, "head_bias": lambda keys: "final_logits_bias" in keys},
    unused=("*coder.embed_tokens.weight", "*coder.embed_positions.weight", "*coder.version"),
    idle=("*.encoder_attn*",),  # of a decoder without an encoder
    aliases={"shared.": "decoder.embed_tokens."},
)
# Their decoder starts with the last token of the source, a language.
_OTHER_START = dict.fromkeys(("ForSequenceClassification", "ForQuestionAnswering"))
MBART = BART.derive("mbart", tasks=_OTHER_START, arrangement="pre")


def _make_sinusoids(**options: Any) -> Rule:
    """Return the rule for sinusoidal positions, all sines before all cosines; `options` are those of `Sinusoidal`."""
    return lambda c: Sinusoidal(key("max_position_embeddings")(c), interleaved=False, **options)


MARIAN = BART.derive(
    "marian",
    vocab=lambda c: key(*(["decoder_vocab_size"] if _is_decoder_only(c) else []), "vocab_size")(c),
    from_keys={"stored_sinusoids": lambda keys: any(key.endswith("embed_positions.weight") for key in keys)},
    refuse={"share_encoder_decoder_embeddings": (True, None)},
    embed_norm=False,
    learned_positions=None,
    sinusoids=_make_sinusoids(),
)
PEGASUS = MARIAN.derive("pegasus", arrangement="pre")
PLBART = BART.derive("plbart", tasks=_OTHER_START, embed_scale=make_embedding_scale(True))
MVP = BART.derive("mvp", refuse={"use_prompt": (False, None)})
BLENDERBOT = BART.derive(
    "blenderbot", layers=_choose_size("{}_layers", 2, 24), arrangement="pre", embed_norm=False, position_offset=0
)
BLENDERBOT_SMALL = BART.derive(
    "blenderbot-small",
    position_offset=0,
    embed_norm_first=_is_decoder_only,
    embed_scale=lambda c: 1.0 if _is_decoder_only(c) else make_embedding_scale(False)(c),
    decoder=lambda c: {**_read_decoder(c), "embed_norm_first": True, "embed_scale": 1.0},
)


M2M_100 = BART.derive(
    "m2m_100",
    arrangement="pre",
    defaults={"activation_function": "relu"},
    embed_scale=make_embedding_scale(True),
    embed_norm=False,
    learned_positions=None,
    sinusoids=lambda c: _make_sinusoids(offset=key("pad_token_id", default=1)(c) + 1, inclusive=True)(c),
)
XGLM = M2M_100.derive(
    "xglm",
    names={"embed": "embed_tokens", **_map_decoder_names("")},
    refuse={"pad_token_id": (0, 1, None)},  # the table is 0 in its row, which for other ids may be a token's
    kind="decoder",
    layers=key("num_layers"),
    heads=key("attention_heads"),
    ffn=key("ffn_dim"),
    decoder={},
    defaults={"activation_function": "gelu"},
    sinusoids=_make_sinusoids(offset=2, inclusive=True),
)
