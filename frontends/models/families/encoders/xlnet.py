"""XLNet: attention to contents, distances and segments.

The query stream, which predicts tokens in shuffled order, is left out, as in transformers without a target.
"""

from __future__ import annotations

from dataclasses import replace

from weft.ir.recipes import Permute, Recipe, Reshape

from ....dsl import SinusoidalDistances, TransformerXLAttention
from ...tables.family import Fetch, key, template
from ...tables.settings import Settings
from ...tables.templates import reshape_tensor
from ...task_heads import SPANS, Head
from .bert import BERT

_LAYER = "layer.{i}"
_ATTENTION = f"{_LAYER}.rel_attn"


@template
def _merge_heads(fetch: Fetch, part: str, settings: Settings, name: str, transpose: bool = True) -> Recipe:
    """Return a linear layer stored [in, heads, d], or without `transpose` [out, heads, d], as a matrix [out, in]."""
    matrix = Reshape(fetch(f"{_ATTENTION}.{name}"), (settings.dim, -1))
    return Permute(matrix, (1, 0)) if transpose else matrix


_SUMMARY = Head(
    *("text-classification", "logits_proj", "last", "sequence_summary.summary"),
    activation=key("summary_activation", default="tanh"),
    refuse={"summary_type": ("last", None), "summary_use_proj": (True, None)},
)
XLNET = BERT.derive(
    "xlnet",
    inert=("d_head",),
    names={
        "embed": "word_embedding",
        **{f"layers.{{i}}.attn.{which}": _merge_heads(which) for which in "qkvr"},
        "layers.{i}.attn.o": _merge_heads("o", transpose=False),
        "layers.{i}.attn.content_bias": reshape_tensor(f"{_ATTENTION}.r_w_bias", -1),
        "layers.{i}.attn.distance_bias": reshape_tensor(f"{_ATTENTION}.r_r_bias", -1),
        "layers.{i}.attn.segment_bias": reshape_tensor(f"{_ATTENTION}.r_s_bias", -1),
        "layers.{i}.attn.segments": reshape_tensor(f"{_ATTENTION}.seg_embed", 2, -1),
        "layers.{i}.attn_norm": f"{_ATTENTION}.layer_norm",
        "layers.{i}.ffn.up": f"{_LAYER}.ff.layer_1",
        "layers.{i}.ffn.down": f"{_LAYER}.ff.layer_2",
        "layers.{i}.ffn_norm": f"{_LAYER}.ff.layer_norm",
    },
    prefix="transformer.",
    from_keys={"pooler": None},
    tasks={
        "ForSequenceClassification": _SUMMARY,
        "ForMultipleChoice": replace(_SUMMARY, task="multiple-choice"),
        "ForQuestionAnsweringSimple": SPANS,
        "ForQuestionAnswering": None,  # by beams of starts and ends
        "LMHeadModel": Head("fill-mask", "lm_loss", tied=key("tie_word_embeddings", default=True)),
        "ForMaskedLM": None,
        **dict.fromkeys(("ForNextSentencePrediction", "ForPreTraining")),
    },
    idle=("*mask_emb",),
    unused=("lm_loss.*", "sequence_summary.*", "logits_proj.*", "classifier.*", "qa_outputs.*"),
    refuse={"attn_type": ("bi", None), "bi_data": (False, None)},
    dim=key("d_model"),
    layers=key("n_layer"),
    heads=key("n_head"),
    ffn=key("d_inner"),
    context=None,
    learned_positions=None,
    token_types=0,
    embed_norm=False,
    activation=key("ff_activation", default="gelu"),
    relative=lambda c: SinusoidalDistances(max(c.get("clamp_len", -1), 0) or None, segments=True),
    mixer=lambda c: TransformerXLAttention(key("n_head")(c)),
)
