"""Task heads: the heads of a family's classes in transformers, selected by the class that a config names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Add, Recipe, Scale, Slice

from ..dsl import HeadTransform, TaskHead
from ..dsl.heads import FIXED, PROBLEMS
from .left_out import LeftOut, summarize
from .tables.family import Config, Family, Fetch, Names, Rule, key
from .tables.settings import ACTIVATIONS, Settings, build_norm

_CLASS = re.compile(r"(?:For[A-Z]\w*|(?:With)?LMHeadModel|DoubleHeadsModel)$")
GENERATES = ("ForCausalLM", "LMHeadModel", "WithLMHeadModel", "ForConditionalGeneration")
BASE = "that of the base model"  # a value of `Head.activation`
SEPARABLE_ENCODERS = ("t5", "mt5", "umt5")  # encoder-decoders whose checkpoints may have the encoder only
_BUFFERS = re.compile(r"(position_ids|inv_freq|masked_bias|attn\.bias|attention\.bias|version)$")


@dataclass(frozen=True)
class Head:
    """A description of a `TaskHead` for `task`: its settings, and the checkpoint names of its parameters.

    out: name of the last linear layer. out_bias: name of its bias, if that is not {out}.bias.
    dense, norm: names of the layers of its `HeadTransform`; "" without them. The norm is of the base model's kind.
    prefix: prefix of the base model's tensors, if it differs from the family's. refuse: as in `Table`.
    The other fields are those of `TaskHead` and `HeadTransform`, each a constant or a rule (a function of the config).
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

    def build_head(self, config: Config, s: Settings) -> TaskHead:
        """Return the head that `config` requests, for a base model with the settings `s`."""

        def evaluate(rule: Any) -> Any:
            return rule(config) if callable(rule) else rule

        transform, tied = None, bool(evaluate(self.tied))
        if self.dense:
            activation, norm = evaluate(self.activation), build_norm(s) if self.norm else None
            activation = s.activation if activation == BASE else activation
            width = s.embed_dim if tied else evaluate(self.width)
            bias = bool(evaluate(self.dense_bias))
            transform = HeadTransform(norm, ACTIVATIONS.get(activation, activation), bias, width)
        labels: Any = None if self.task in (*FIXED, "fill-mask") else evaluate(self.labels) or read_labels(config)
        problem = config.get("problem_type") if self.task.endswith("classification") else None
        pool, bias = evaluate(self.pool), bool(evaluate(self.bias))
        problem = problem if problem in PROBLEMS else None
        also = None if self.also is None else self.also.build_head(config, s)
        skip, start = evaluate(self.skip), evaluate(self.start)
        head = TaskHead(self.task, labels, pool, transform, bias, tied, evaluate(self.token), problem, skip, start)
        return replace(head, output=self.output, also=also)

    def names(self, home: str = "head") -> Names:
        """Return the checkpoint names (or templates) of the head's parameters, keyed by parameter (`home`.out, …)."""
        names: Names = {f"{home}.out": self.out}
        if self.out_bias:
            names[f"{home}.out.bias"] = self._bias
        if self.dense:
            names[f"{home}.transform.dense"] = self.dense
        if self.norm:
            names[f"{home}.transform.norm"] = self.norm
        return names if self.also is None else names | self.also.names(f"{home}.also")

    def _bias(self, fetch: Fetch, part: str, settings: Settings) -> Recipe:
        default_name = f"{self.out}.bias"  # in checkpoints with tied weights, either name may exist
        return fetch(default_name if fetch.has(default_name) and not fetch.has(self.out_bias) else self.out_bias)


def read_labels(config: Config) -> int | tuple[str, ...]:
    """Return the names in id2label, by ascending id; raise WeftError if an id is not an integer. Without id2label,
    return num_labels, by default 2 as in transformers."""
    names = config.get("id2label")
    if isinstance(names, Mapping) and names:
        try:
            return tuple(str(name) for _, name in sorted((int(i), name) for i, name in names.items()))
        except (TypeError, ValueError):
            raise WeftError(f"id2label={names!r:.60} must map integers to names") from None
    return int(config.get("num_labels") or 2)


def find_class_suffix(config: Config) -> str:
    """Return the end of the config's first class after the base model's name (ForTokenClassification); "" if none."""
    classes = config.get("architectures")
    match = _CLASS.search(str(classes[0])) if isinstance(classes, list) and classes else None
    return match[0] if match else ""


def find_base_classes(config: Config) -> list[str] | None:
    """Return `architectures`, each class replaced by its base model (BertForMaskedLM: BertModel); None if missing."""
    classes = config.get("architectures")
    return classes and [f"{_CLASS.sub('', str(name)).removesuffix('Model')}Model" for name in classes]


def add_head(table: Family, config: Config, keys: frozenset[str], source: str) -> tuple[Family, LeftOut | None]:
    """Return (head table, None): the head table is `table` with the head of the class that `config` names.

    If `table.tasks` does not list that class, return (`table`, None). If the tensor names `keys` of the checkpoint
    (empty without one) lack the head's tensors, return a table without the head, and the head as left out.

    Raises:
        WeftError: if the table or the head refuses a key of `config`, which errors call `source`.
    """
    head = table.tasks.get(find_class_suffix(config))
    if head is None:
        return table, None
    has_prefix = head.prefix is not None and (not keys or any(k.startswith(head.prefix) for k in keys))
    prefix = (head.prefix if has_prefix else None) or table.prefix
    with_head_table = replace(table, refuse={**table.refuse, **(head.refuse or {})}, prefix=prefix)
    settings = with_head_table.read(config, keys, source)
    task_head = head.build_head(config, settings)
    fetch = Fetch(keys, with_head_table.prefix, with_head_table.aliases, "")
    needed = [*([] if task_head.tied else [head.out]), *filter(None, (head.dense, head.norm))]
    missing = [f"{name}.weight" for name in needed if keys and not fetch.has(f"{name}.weight")]
    if missing:
        detail = f"the checkpoint lacks {summarize(missing)}, which {config['architectures'][0]} initializes at random"
        return replace(table, prefix=prefix), LeftOut("head", missing[0].partition(".")[0], detail, changes=True)
    rule: Any = lambda c: head.build_head(c, settings)  # noqa: E731 - a module is callable, and would be called
    names = head.names("decoder.head" if settings.kind == "encoder-decoder" else "head")
    return replace(with_head_table, names={**table.names, **names}, settings={**table.settings, "head": rule}), None


def add_token_head(table: Family, config: Config, keys: frozenset[str], source: str, tokens: Sequence[int]) -> Family:
    """Return `table` with a reranker's head: the logit of tokens[0], minus that of tokens[1] if there are two.

    Raises:
        WeftError: if the model of `config` (called `source`) is not a decoder, or its logits are not linear in the
            hidden states.
    """
    s = table.read(config, keys, source)
    if s.kind != "decoder" or s.logit_softcap is not None or s.head_transform is not None:
        raise WeftError(f"{source}: LogitScore needs a decoder whose logits are linear in the hidden states")

    def rows(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        name = table.names["embed" if s.tie and part == "weight" else "lm_head"]
        head_rows = fetch(f"{name}.{part}") if isinstance(name, str) else name(fetch, part, settings)
        first, *second = (Slice(head_rows, 0, token, token + 1) for token in tokens)
        row = Add((first, Scale(second[0], -1.0))) if second else first
        return row if s.logit_scale == 1 else Scale(row, s.logit_scale)

    rule: Any = lambda c: TaskHead("text-classification", 1, "last", bias=s.head_bias)  # noqa: E731 - as above
    return replace(table, names={**table.names, "head.out": rows}, settings={**table.settings, "head": rule})


def extract_encoder(table: Family) -> Family:
    """Return the table of the encoder alone of `table`, an encoder-decoder; its only task is token classification."""
    names = {key.removeprefix("encoder."): value for key, value in table.names.items()}
    refuse = {key: values for key, values in table.refuse.items() if key != "is_encoder_decoder"}
    encoder = table.derive(
        *table.model_types, names=names, kind="encoder", unused=(*table.unused, "lm_head.*", "decoder.*")
    )
    return replace(encoder, refuse=refuse, tasks={"ForTokenClassification": replace(TOKENS, prefix="transformer.")})


def write_head_config(table: Family, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config entries for the head in `meta` (graph.meta): class, labels, problem_type; {} if none."""
    if (task := meta.get("task")) is None:
        return {}
    suffix = next((name for name, head in table.tasks.items() if head.task == task), "")
    base = re.sub(_CLASS, "", table.transformers)
    names, problem = meta.get("labels"), meta.get("problem_type")
    config: dict[str, Any] = {"problem_type": problem} if problem else {}
    if names is not None:
        config |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    return {"architectures": [f"{base}{suffix}"], **config}


def find_unread_head(table: Family, config: Config, unread_keys: Sequence[str], logits: bool = False) -> LeftOut | None:
    """Return, as left out, the head of the class that `config` names. Return None if it names none, if `table.tasks`
    lists the class, if no tensor in `unread_keys` can belong to a head, or if the class is a language model and the
    model outputs `logits`."""
    suffix = find_class_suffix(config)
    if not suffix or suffix in table.tasks or (suffix in GENERATES and logits):
        return None
    keys = [k for k in unread_keys if not _BUFFERS.search(k) and not (table.prefix and k.startswith(table.prefix))]
    if not keys:
        return None
    heads = f"only the heads {', '.join(table.tasks)}" if table.tasks else "no head"
    detail = f"{summarize(keys)} of {config['architectures'][0]}; weft reads {heads} of these models"
    return LeftOut("head", keys[0].partition(".")[0], detail, changes=True)


# -- heads that many families share

_tied = key("tie_word_embeddings", default=True)
TOKENS = Head("token-classification", "classifier")
SPANS = Head("question-answering", "qa_outputs")


def build_lm_head(home: str, dense: str, norm: str, out: str = "decoder", **options: Any) -> Head:
    """Return a masked-language-model head with layers `home`.`dense`, `home`.`norm`, `home`.`out` and `home`.bias.
    `options` are further fields of `Head`."""
    names: dict[str, Any] = {"dense": f"{home}.{dense}", "norm": f"{home}.{norm}", "out_bias": f"{home}.bias"}
    return Head("fill-mask", f"{home}.{out}", **{"activation": "gelu", "tied": _tied, **names, **options})


def build_dense_head(activation: str | Rule = "tanh", home: str = "classifier") -> Head:
    """Return a classification head on the first token with the layers `home`.dense, activation and `home`.out_proj."""
    return Head("text-classification", f"{home}.out_proj", "first", f"{home}.dense", activation=activation)


def add_pair_head(masked_lm: Head, pairs: Head, output: str = "seq_relationship_logits") -> Head:
    """Return the head `masked_lm`, whose output becomes prediction_logits, with the additional head `pairs`, a
    classifier of sequence pairs called `output`."""
    return replace(masked_lm, output="prediction_logits", also=replace(pairs, output=output))


_words = build_lm_head("cls.predictions", "transform.dense", "transform.LayerNorm", activation=BASE)
_next = Head("next-sentence-prediction", "cls.seq_relationship", "pooler", labels=2)
BERT_HEADS: dict[str, Head | None] = {
    "ForSequenceClassification": Head("text-classification", "classifier", "pooler"),
    "ForTokenClassification": TOKENS,
    "ForQuestionAnswering": SPANS,
    "ForMultipleChoice": Head("multiple-choice", "classifier", "pooler"),
    "ForMaskedLM": _words,
    "ForNextSentencePrediction": _next,
    "ForPreTraining": add_pair_head(_words, _next),
}
ROBERTA_HEADS: dict[str, Head | None] = {
    "ForSequenceClassification": build_dense_head(),
    "ForMaskedLM": build_lm_head("lm_head", "dense", "layer_norm"),
    **dict.fromkeys(("ForNextSentencePrediction", "ForPreTraining")),
}
# Of decoders: GenericForSequenceClassification and similar classes of transformers.
GENERIC_HEADS: dict[str, Head | None] = {
    "ForSequenceClassification": Head("text-classification", "score", "last", bias=False),
    "ForTokenClassification": Head(
        "token-classification", "score", bias=key("token_classification_bias", default=True)
    ),
    "ForQuestionAnswering": Head("question-answering", "qa_outputs", prefix="transformer."),
}
_start = key("decoder_start_token_id", default=0)
_eos = key("eos_token_id", default=1)
LAST_EOS_HEAD = replace(build_dense_head(home="classification_head"), pool="token", token=_eos, start=_start)
ENCODER_DECODER_HEADS: dict[str, Head | None] = {
    "ForSequenceClassification": LAST_EOS_HEAD,
    "ForQuestionAnswering": replace(SPANS, start=_start),
}
GPT_HEADS: dict[str, Head | None] = {**GENERIC_HEADS, "ForTokenClassification": TOKENS, "ForQuestionAnswering": SPANS}
