"""Scores of pairs of texts in a folder: files of sentence-transformers' CrossEncoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import Record, read_json

from ....models.left_out import LeftOut, unread_entries

LOGIT_SCORE = "LogitScore"  # the module that scores by the logits of tokens
_CONFIG = "config_sentence_transformers.json"
_INPUTS = "sentence_bert_config.json"
# Keys of its files that are read, or that the kinds of its modules imply.
_KNOWN = {
    _CONFIG: ("__version__", "model_type", "prompts", "default_prompt_name", "activation_fn"),
    _INPUTS: ("transformer_task", "module_output_name", "modality_config"),
    "config.json": ("true_token_id", "false_token_id", "module_input_name"),
}


def score_tokens(folder: Path) -> list[int]:
    """The tokens whose logits score a pair: that of yes, and that of no if the folder names one; empty without such a
    module."""
    place = modules(folder).get(LOGIT_SCORE)
    if place is None:
        return []
    said = Record.read(folder / place / "config.json")
    names = [name for name in ("true_token_id", "false_token_id") if said.data.get(name) is not None]
    return [said.integer(name, least=0) for name in names]


def rank_files(folder: Path) -> list[Path]:
    """The files of sentence-transformers in the `folder` of a reranker."""
    scores = [folder / place / "config.json" for kind, place in modules(folder).items() if kind == LOGIT_SCORE]
    files = [folder / "modules.json", folder / _CONFIG, folder / _INPUTS, *scores]
    return [file for file in files if file.is_file()]


def unread_ranking(folder: Path) -> Iterator[LeftOut]:
    """Yield the keys of `rank_files` that nothing reads."""
    for file in rank_files(folder):
        if (known := _KNOWN.get(file.name)) is not None:
            yield from unread_entries(read_json(file), known, str(file.relative_to(folder)))


def rank_facts(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the score of a pair is made of its logit, as in graph.meta: the activation, whether the chat template
    makes the prompt of a pair, and the instruction before it."""
    said = _record(folder / _CONFIG)
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function") or said.data.get("activation_fn")
    inputs = _record(folder / _INPUTS)
    takes = inputs.data.get("modality_config")
    template = (folder / "chat_template.jinja").is_file() and bool(modules(folder))
    prompts, name = said.record("prompts", {}), said.text("default_prompt_name", "") or ""
    return {
        "activation": str(named or "Sigmoid").rpartition(".")[2].lower(),
        "template": template and ("message" in takes if isinstance(takes, Mapping) else bool(score_tokens(folder))),
        "prompt": prompts.text(name, "") if name else "",
    }


def modules(folder: Path) -> dict[str, str]:
    """The kinds of the modules of a folder of sentence-transformers, and the folder of each; empty for another."""
    if not (folder / "modules.json").is_file():
        return {}
    listed = read_json(folder / "modules.json", list)
    return {str(m.get("type")).rpartition(".")[2]: str(m.get("path")) for m in listed if isinstance(m, Mapping)}


def _record(path: Path) -> Record:
    return Record.read(path) if path.is_file() else Record(path, {})


def check_tokens(tokens: list[int], vocab: int | None, source: str) -> None:
    """Raise WeftError if one of `tokens` is none of the vocabulary."""
    if wrong := [token for token in tokens if vocab is not None and token >= vocab]:
        raise WeftError(f"{source}: its LogitScore reads token {wrong[0]}, but the model has {vocab} tokens")
