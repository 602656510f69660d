"""Image encoders (ViT, DeiT, I-JEPA, MSN, MAE, DINOv2, CLIP, SigLIP), and their text encoders."""

from __future__ import annotations

from dataclasses import replace

from weft.ir.recipes import Concat, Recipe, Reshape, Scale, Slice

from ....dsl import Dense, SentencePooling
from ...tables.family import Config, Family, Fetch, Names, Template, key, template
from ...tables.settings import Settings
from ...tables.templates import reshape_tensor
from ...task_heads import Head
from .bert import BERT


@template
def _stack_tokens(fetch: Fetch, part: str, settings: Settings, *names: str) -> Recipe:
    """Return learned tokens [n, dim]; each of the n `names` is stored as [1, 1, dim]."""
    tokens = tuple(Reshape(fetch(name), (1, settings.dim)) for name in names)
    return Concat(tokens) if len(tokens) > 1 else tokens[0]


def _read_image_size(config: Config) -> int:
    """Return the side length of images in pixels; raise ValueError if they are not square."""
    size = key("image_size", default=224)(config)
    pair = size if isinstance(size, list) else [size, size]
    if len(set(pair)) != 1:
        raise ValueError(f"image_size={size} is not supported: images must be square")
    return int(pair[0])


_LAYER = "encoder.layer.{i}"
VIT = Family(
    model_types=("vit",),
    settings={
        "kind": "image-encoder",
        "vocab": None,
        "dim": key("hidden_size"),
        "layers": key("num_hidden_layers"),
        "heads": key("num_attention_heads"),
        "ffn": key("intermediate_size"),
        "image": _read_image_size,
        "patch": key("patch_size", default=16),
        "channels": key("num_channels", default=3),
        "norm": "layer",
        "eps": key("layer_norm_eps", default=1e-12),
        "activation": key("hidden_act", default="gelu"),
        "gated": False,
        "qkv_bias": key("qkv_bias", default=True),
        "out_bias": True,
        "ffn_bias": True,
    },
    names={
        "patches": "embeddings.patch_embeddings.projection",
        "prefix": _stack_tokens("embeddings.cls_token"),
        "positions.weight": lambda fetch, part, s: Reshape(
            fetch("embeddings.position_embeddings"), (s.prefix_tokens + (s.image // s.patch) ** 2, s.dim)
        ),
        "layers.{i}.attn_norm": f"{_LAYER}.layernorm_before",
        **{f"layers.{{i}}.attn.{x[0]}": f"{_LAYER}.attention.attention.{x}" for x in ("query", "key", "value")},
        "layers.{i}.attn.o": f"{_LAYER}.attention.output.dense",
        "layers.{i}.ffn_norm": f"{_LAYER}.layernorm_after",
        "layers.{i}.ffn.up": f"{_LAYER}.intermediate.dense",
        "layers.{i}.ffn.down": f"{_LAYER}.output.dense",
        "final_norm": "layernorm",
        "pooler": "pooler.dense",
    },
    prefix="vit.",
    tasks={"ForImageClassification": Head("image-classification", "classifier", "first")},
    from_keys={
        "image_pooler": lambda keys: "dense" if any(k.endswith("pooler.dense.weight") for k in keys) else "none"
    },
    unused=("*classifier.*", "*mask_token", "decoder.*"),
    refuse={"pooler_act": ("tanh", None)},
)
DEIT = VIT.derive(
    "deit",
    names={"prefix": _stack_tokens("embeddings.cls_token", "embeddings.distillation_token")},
    prefix="deit.",
    prefix_tokens=2,
)
VIT_MSN = VIT.derive("vit_msn", defaults={"layer_norm_eps": 1e-6})
VIT_MAE = VIT.derive(  # no patch is masked, as when it is used for features
    "vit_mae", from_keys={"image_pooler": None}, unused=("*classifier.*", "*mask_token", "decoder.*", "fc_norm.*")
)
IJEPA = VIT.derive(
    "ijepa",
    prefix="ijepa.",
    tasks={"ForImageClassification": Head("image-classification", "classifier", "mean")},
    prefix_tokens=0,
)


def _apply_layer_scale(name: str, scale: str) -> Template:
    """Return a template for layer `name`, the last of a sublayer, times the stored layer `scale` (Touvron 2021)."""
    factor = f"{_LAYER}.{scale}.lambda1"
    return lambda fetch, part, settings: Scale(fetch(f"{name}.{part}"), fetch(factor))


def _read_dinov2_ffn(config: Config) -> int:
    hidden = int(key("hidden_size")(config) * config.get("mlp_ratio", 4))
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if config.get("use_swiglu_ffn") else hidden


@template
def _slice_dinov2_up(fetch: Fetch, part: str, s: Settings, index: int) -> Recipe:
    """Return gate (`index` 0) or up (1) of a fused SwiGLU; without a gate, fc1."""
    if not s.gated:
        return fetch(f"{_LAYER}.mlp.fc1.{part}")
    rows = s.ffn
    assert isinstance(rows, int)
    return Slice(fetch(f"{_LAYER}.mlp.weights_in.{part}"), 0, index * rows, (index + 1) * rows)


def _scale_dinov2_down(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    name = "weights_out" if settings.gated else "fc2"
    return _apply_layer_scale(f"{_LAYER}.mlp.{name}", "layer_scale2")(fetch, part, settings)


_PARTS = Head("image-classification", "classifier", "first+mean")
DINOV2 = VIT.derive(
    "dinov2",
    inert=("intermediate_size",),
    names={
        "layers.{i}.attn_norm": f"{_LAYER}.norm1",
        "layers.{i}.attn.o": _apply_layer_scale(f"{_LAYER}.attention.output.dense", "layer_scale1"),
        "layers.{i}.ffn_norm": f"{_LAYER}.norm2",
        "layers.{i}.ffn.gate": _slice_dinov2_up(0),
        "layers.{i}.ffn.up": _slice_dinov2_up(1),
        "layers.{i}.ffn.down": _scale_dinov2_down,
    },
    prefix="dinov2.",
    tasks={"ForImageClassification": _PARTS},
    from_keys={"image_pooler": None},
    defaults={"layer_norm_eps": 1e-6},
    ffn=_read_dinov2_ffn,
    activation=lambda c: "silu" if c.get("use_swiglu_ffn") else c.get("hidden_act", "gelu"),
    gated=lambda c: bool(c.get("use_swiglu_ffn")),
    image_pooler="first",
)
DINOV2_REGISTERS = DINOV2.derive(
    "dinov2_with_registers",
    names={"registers": lambda fetch, part, s: Reshape(fetch("embeddings.register_tokens"), (s.registers, s.dim))},
    prefix="dinov2_with_registers.",
    tasks={"ForImageClassification": replace(_PARTS, skip=lambda c: 1 + key("num_register_tokens", default=4)(c))},
    registers=key("num_register_tokens", default=4),
)

_OLDER = ("add_cross_attention", "tie_encoder_decoder")  # keys that transformers 4 wrote into all configs
_CLIP_LAYER = "encoder.layers.{i}"
_CLIP: Names = {
    "layers.{i}.attn_norm": f"{_CLIP_LAYER}.layer_norm1",
    **{f"layers.{{i}}.attn.{n}": f"{_CLIP_LAYER}.self_attn.{n}_proj" for n in "qkv"},
    "layers.{i}.attn.o": f"{_CLIP_LAYER}.self_attn.out_proj",
    "layers.{i}.ffn_norm": f"{_CLIP_LAYER}.layer_norm2",
    "layers.{i}.ffn.up": f"{_CLIP_LAYER}.mlp.fc1",
    "layers.{i}.ffn.down": f"{_CLIP_LAYER}.mlp.fc2",
}


def _has_projection(config: Config) -> bool:
    """Return whether `architectures` names a class …WithProjection, which projects into the shared embedding space."""
    return "WithProjection" in str(config.get("architectures"))


def _build_clip_pooling(config: Config) -> SentencePooling | None:
    """Return the pooling of CLIP's text encoder with its projection; None for a class without projection.
    It pools the first eos_token_id, or if that is 2 (an error of the first configs) the token with the largest id."""
    if not _has_projection(config):
        return None
    eos, width = key("eos_token_id", default=49407)(config), key("projection_dim", default=512)(config)
    return SentencePooling("token", after=(Dense(width, "identity", bias=False),), token=None if eos == 2 else eos)


CLIP_VISION = VIT.derive(
    "clip_vision_model",
    names={
        **_CLIP,
        "patches": "embeddings.patch_embedding",
        "prefix": reshape_tensor("embeddings.class_embedding", 1, -1),
        "positions": "embeddings.position_embedding",
        "positions.weight": None,
        "embed_norm": "pre_layrnorm",
        "pool_norm": "post_layernorm",
        "projection": "visual_projection",
    },
    prefix="vision_model.",
    from_keys={"image_pooler": None},
    unused=("*position_ids", "visual_projection.*"),
    inert=_OLDER,
    defaults={"patch_size": 32, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"},
    qkv_bias=True,
    patch_bias=False,
    embed_norm=True,
    final_norm=False,
    image_pooler="first",
    projection=lambda c: key("projection_dim", default=512)(c) if _has_projection(c) else None,
)


@template
def _slice_qkv(fetch: Fetch, part: str, settings: Settings, which: int) -> Recipe:
    """Return q (`which` 0), k (1) or v (2) of the fused projection in SigLIP's pooler."""
    rows = settings.dim
    return Slice(fetch(f"head.attention.in_proj_{part}"), 0, which * rows, (which + 1) * rows)


SIGLIP_VISION = CLIP_VISION.derive(
    "siglip_vision_model",
    names={
        "final_norm": "post_layernorm",
        "pooler.query": _stack_tokens("head.probe"),
        **{f"pooler.attn.{name}": _slice_qkv(which) for which, name in enumerate("qkv")},
        "pooler.attn.o": "head.attention.out_proj",
        "pooler.ffn_norm": "head.layernorm",
        "pooler.ffn.up": "head.mlp.fc1",
        "pooler.ffn.down": "head.mlp.fc2",
    },
    from_keys={"image_pooler": lambda keys: "attention" if any(k.endswith("head.probe") for k in keys) else "none"},
    unused=("*position_ids",),
    defaults={"patch_size": 16, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
    prefix_tokens=0,
    patch_bias=True,
    embed_norm=False,
    final_norm=True,
    projection=0,
)

# -- the text encoders in the same space

CLIP_TEXT = BERT.derive(
    "clip_text_model",
    names={
        **_CLIP,
        "embed": "embeddings.token_embedding",
        "positions": "embeddings.position_embedding",
        "final_norm": "final_layer_norm",
        "sentence.after_0.linear": "text_projection",
    },
    prefix="text_model.",
    from_keys={"pooler": None},
    refuse={"is_decoder": None, "position_embedding_type": None},
    unused=("*position_ids", "text_projection.*"),
    inert=_OLDER,
    aliases={"LayerNorm.weight": None, "LayerNorm.bias": None},
    token_types=0,
    arrangement="pre",
    embed_norm=False,
    causal=True,
    sentence=_build_clip_pooling,
    defaults={"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"},
)
SIGLIP_TEXT = CLIP_TEXT.derive(
    "siglip_text_model",
    names={"sentence.after_0.linear": "head"},
    unused=("*position_ids",),
    causal=None,
    sentence=lambda c: SentencePooling("end", after=(Dense(key("projection_size", "hidden_size")(c), "identity"),)),
    defaults={"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
)
