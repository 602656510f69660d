"""Heads of a family's classes in transformers, chosen by the class that a config names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Add, Recipe, Scale, Slice

from ..dsl import HeadTransform, TaskHead
from ..dsl.heads import FIXED, PROBLEMS
from .left_out import LeftOut, several
from .tables.family import Config, Family, Fetch, Names, Rule, key
from .tables.settings import ACTIVATIONS, Settings, norm_of

_CLASS = re.compile(r"(?:For[A-Z]\w*|(?:With)?LMHeadModel|DoubleHeadsModel)$")
GENERATES = ("ForCausalLM", "LMHeadModel", "WithLMHeadModel", "ForConditionalGeneration")
BASE = "that of the base model"  # for an activation
ENCODER_ALONE = ("t5", "mt5", "umt5")  # whose checkpoints may have the encoder only
_BUFFERS = re.compile(r"(position_ids|inv_freq|masked_bias|attn\.bias|attention\.bias|version)$")


@dataclass(frozen=True)
class Head:
    """A `TaskHead` of `task`, and the checkpoint names of its parameters: `out` of the last linear map (`out_bias` of
    its bias, where that is called otherwise), `dense` and `norm` of its transform, where it has them.

    The other fields are those of `TaskHead` and `HeadTransform`, as constants or as rules of the config. The norm is as
    those of the base model. `prefix` is that of the base model's tensors, where it is another than the family's.
    `refuse` is as in tables.
    """

    task: str
    out: str
    pool: str | Rule | None = None
    dense: str = ""
    norm: str = ""
    activation: str | Rule | None = "tanh"
    dense_bias: bool | Rule = True
    width: int | Rule | None = None
    bias: bool | Rule = True
    out_bias: str = ""
    tied: bool | Rule = False
    token: int | Rule | None = None
    labels: int | Rule | None = None
    prefix: str | None = None
    refuse: Mapping[str, tuple[Any, ...]] | None = None
    skip: int | Rule = 1
    start: int | Rule = 0
    output: str = "logits"
    also: Head | None = None

    def made(self, config: Config, s: Settings) -> TaskHead:
        """The head on the base model of settings `s`."""

        def said(rule: Any) -> Any:
            return rule(config) if callable(rule) else rule

        transform, tied = None, bool(said(self.tied))
        if self.dense:
            activation, norm = said(self.activation), norm_of(s) if self.norm else None
            activation = s.activation if activation == BASE else activation
            width = s.embed_dim if tied else said(self.width)
            bias = bool(said(self.dense_bias))
            transform = HeadTransform(norm, ACTIVATIONS.get(activation, activation), bias, width)
        labels: Any = None if self.task in (*FIXED, "fill-mask") else said(self.labels) or labels_of(config)
        problem = config.get("problem_type") if self.task.endswith("classification") else None
        pool, bias = said(self.pool), bool(said(self.bias))
        problem = problem if problem in PROBLEMS else None
        also = None if self.also is None else self.also.made(config, s)
        skip, start = said(self.skip), said(self.start)
        head = TaskHead(self.task, labels, pool, transform, bias, tied, said(self.token), problem, skip, start)
        return replace(head, output=self.output, also=also)

    def names(self, home: str = "head") -> Names:
        """The checkpoint names of its parameters, which are called so under `home`."""
        names: Names = {f"{home}.out": self.out}
        if self.out_bias:
            names[f"{home}.out.bias"] = self._bias
        if self.dense:
            names[f"{home}.transform.dense"] = self.dense
        if self.norm:
            names[f"{home}.transform.norm"] = self.norm
        return names if self.also is None else names | self.also.names(f"{home}.also")

    def _bias(self, fetch: Fetch, part: str, settings: Settings) -> Recipe:
        own = f"{self.out}.bias"  # of checkpoints where the two are one tensor, either may be there
        return fetch(own if fetch.has(own) and not fetch.has(self.out_bias) else self.out_bias)


def labels_of(config: Config) -> int | tuple[str, ...]:
    """The names of a config's labels in order, or how many there are: 2 by default, as in transformers."""
    names = config.get("id2label")
    if isinstance(names, Mapping) and names:
        try:
            return tuple(str(name) for _, name in sorted((int(i), name) for i, name in names.items()))
        except (TypeError, ValueError):
            raise WeftError(f"id2label={names!r:.60} does not map numbers to names") from None
    return int(config.get("num_labels") or 2)


def suffix_of(config: Config) -> str:
    """Return what the class of a config adds to the name of its base model (ForTokenClassification); "" if nothing."""
    classes = config.get("architectures")
    found = _CLASS.search(str(classes[0])) if isinstance(classes, list) and classes else None
    return found[0] if found else ""


def base_class(config: Config) -> list[str] | None:
    """Return `architectures` with each class replaced by its base model (["BertModel"] for ["BertForMaskedLM"])."""
    classes = config.get("architectures")
    return classes and [f"{_CLASS.sub('', str(name)).removesuffix('Model')}Model" for name in classes]


def with_head(table: Family, config: Config, keys: frozenset[str], source: str) -> tuple[Family, LeftOut | None]:
    """`table` with the head that the class of `config` has, if it has one that the table knows; `keys` are those of the
    checkpoint, if there is one. The head is returned as left out where the checkpoint lacks its tensors.

    Raises:
        WeftError: if the table refuses a key of the config.
    """
    head = table.tasks.get(suffix_of(config))
    if head is None:
        return table, None
    other = head.prefix is not None and (not keys or any(k.startswith(head.prefix) for k in keys))
    prefix = (head.prefix if other else None) or table.prefix
    headed = replace(table, refuse={**table.refuse, **(head.refuse or {})}, prefix=prefix)
    settings = headed.read(config, keys, source)
    made = head.made(config, settings)
    fetch = Fetch(keys, headed.prefix, headed.aliases, "")
    needed = [*([] if made.tied else [head.out]), *filter(None, (head.dense, head.norm))]
    lacking = [f"{name}.weight" for name in needed if keys and not fetch.has(f"{name}.weight")]
    if lacking:
        told = f"{config['architectures'][0]} draws {several(lacking)} at random, which the checkpoint lacks"
        return replace(table, prefix=prefix), LeftOut("head", lacking[0].partition(".")[0], told, changes=True)
    rule: Any = lambda c: head.made(c, settings)  # noqa: E731 - a module is callable itself, and would be called
    names = head.names("decoder.head" if settings.kind == "encoder-decoder" else "head")
    return replace(headed, names={**table.names, **names}, settings={**table.settings, "head": rule}), None


def with_tokens(table: Family, config: Config, keys: frozenset[str], source: str, tokens: Sequence[int]) -> Family:
    """`table` with a head that scores a text by the logit of the first of `tokens`, less that of the second if there is
    one: what a reranker makes of a language model.

    Raises:
        WeftError: if its logits are not a linear map of the hidden states.
    """
    s = table.read(config, keys, source)
    if s.kind != "decoder" or s.logit_softcap is not None or s.head_transform is not None:
        raise WeftError(f"{source}: scores of tokens need a decoder whose logits are a linear map of its hidden states")

    def rows(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        name = table.names["embed" if s.tie and part == "weight" else "lm_head"]
        whole = fetch(f"{name}.{part}") if isinstance(name, str) else name(fetch, part, settings)
        first, *second = (Slice(whole, 0, token, token + 1) for token in tokens)
        made = Add((first, Scale(second[0], -1.0))) if second else first
        return made if s.logit_scale == 1 else Scale(made, s.logit_scale)

    rule: Any = lambda c: TaskHead("text-classification", 1, "last", bias=s.head_bias)  # noqa: E731 - as above
    return replace(table, names={**table.names, "head.out": rows}, settings={**table.settings, "head": rule})


def encoder_alone(table: Family) -> Family:
    """The encoder of `table`, an encoder-decoder's, by itself: its states, or the labels of its tokens."""
    names = {key.removeprefix("encoder."): value for key, value in table.names.items()}
    refuse = {key: values for key, values in table.refuse.items() if key != "is_encoder_decoder"}
    alone = table.but(*table.model_types, names=names, kind="encoder", unused=(*table.unused, "lm_head.*", "decoder.*"))
    return replace(alone, refuse=refuse, tasks={"ForTokenClassification": replace(TOKENS, prefix="transformer.")})


def head_config(table: Family, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config of `table` says of the head in graph.meta `facts`; empty without one."""
    if (task := facts.get("task")) is None:
        return {}
    suffix = next((name for name, head in table.tasks.items() if head.task == task), "")
    base = re.sub(_CLASS, "", table.transformers)
    names, problem = facts.get("labels"), facts.get("problem_type")
    said: dict[str, Any] = {"problem_type": problem} if problem else {}
    if names is not None:
        said |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    return {"architectures": [f"{base}{suffix}"], **said}


def unread_head(table: Family, config: Config, left: Sequence[str], logits: bool = False) -> LeftOut | None:
    """Return the head of the class of `config` if it is no part of a model, whose checkpoint's tensors `left` are left
    out; `logits` says that the model generates."""
    suffix = suffix_of(config)
    if not suffix or suffix in table.tasks or (suffix in GENERATES and logits):
        return None
    keys = [k for k in left if not _BUFFERS.search(k) and not (table.prefix and k.startswith(table.prefix))]
    if not keys:
        return None
    known = ", ".join(table.tasks) or "none"
    told = f"{several(keys)} of {config['architectures'][0]}; heads that weft reads in {table.model_types[0]} models: "
    return LeftOut("head", keys[0].partition(".")[0], told + known, changes=True)


# -- heads that many families share

_tied = key("tie_word_embeddings", default=True)
TOKENS = Head("token-classification", "classifier")
SPANS = Head("question-answering", "qa_outputs")


def language_model(home: str, dense: str, norm: str, out: str = "decoder", **more: Any) -> Head:
    """A masked language model whose tensors are called so under `home`, where its bias has a name of its own."""
    names: dict[str, Any] = {"dense": f"{home}.{dense}", "norm": f"{home}.{norm}", "out_bias": f"{home}.bias"}
    return Head("fill-mask", f"{home}.{out}", **{"activation": "gelu", "tied": _tied, **names, **more})


def dense_first(activation: str | Rule = "tanh", home: str = "classifier") -> Head:
    """Labels by the first token, after a map called dense under `home`."""
    return Head("text-classification", f"{home}.out_proj", "first", f"{home}.dense", activation=activation)


def pretrained(words: Head, sentences: Head, output: str = "seq_relationship_logits") -> Head:
    """A masked language model with a classifier of pairs beside it."""
    return replace(words, output="prediction_logits", also=replace(sentences, output=output))


_words = language_model("cls.predictions", "transform.dense", "transform.LayerNorm", activation=BASE)
_next = Head("next-sentence-prediction", "cls.seq_relationship", "pooler", labels=2)
BERT_HEADS: dict[str, Head | None] = {
    "ForSequenceClassification": Head("text-classification", "classifier", "pooler"),
    "ForTokenClassification": TOKENS,
    "ForQuestionAnswering": SPANS,
    "ForMultipleChoice": Head("multiple-choice", "classifier", "pooler"),
    "ForMaskedLM": _words,
    "ForNextSentencePrediction": _next,
    "ForPreTraining": pretrained(_words, _next),
}
ROBERTA_HEADS: dict[str, Head | None] = {
    "ForSequenceClassification": dense_first(),
    "ForMaskedLM": language_model("lm_head", "dense", "layer_norm"),
    **dict.fromkeys(("ForNextSentencePrediction", "ForPreTraining")),
}
# Of decoders: GenericForSequenceClassification and its like.
GENERIC_HEADS: dict[str, Head | None] = {
    "ForSequenceClassification": Head("text-classification", "score", "last", bias=False),
    "ForTokenClassification": Head(
        "token-classification", "score", bias=key("token_classification_bias", default=True)
    ),
    "ForQuestionAnswering": Head("question-answering", "qa_outputs", prefix="transformer."),
}
_start = key("decoder_start_token_id", default=0)
_eos = key("eos_token_id", default=1)
AT_THE_END = replace(dense_first(home="classification_head"), pool="token", token=_eos, start=_start)
ENCODER_DECODER_HEADS: dict[str, Head | None] = {
    "ForSequenceClassification": AT_THE_END,
    "ForQuestionAnswering": replace(SPANS, start=_start),
}
GPT_HEADS: dict[str, Head | None] = {
    **GENERIC_HEADS,
    "ForTokenClassification": TOKENS,
    "ForQuestionAnswering": SPANS,
}
