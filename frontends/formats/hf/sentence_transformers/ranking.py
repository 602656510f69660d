"""Read the files of a reranker: those of sentence-transformers' CrossEncoder, which scores pairs of sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import Record, read_json

from ....models.left_out import LeftOut, find_unread_entries

LOGIT_SCORE = "LogitScore"  # the module that scores by the logits of tokens
_CONFIG = "config_sentence_transformers.json"
_INPUTS = "sentence_bert_config.json"
# Keys of its files that are read, or implied by the kinds of its modules.
_KNOWN = {
    _CONFIG: ("__version__", "model_type", "prompts", "default_prompt_name", "activation_fn"),
    _INPUTS: ("transformer_task", "module_output_name", "modality_config"),
    "config.json": ("true_token_id", "false_token_id", "module_input_name"),
}


def read_score_tokens(folder: Path) -> list[int]:
    """Return the ids of the tokens whose logits score a pair: true ("yes"), then false ("no") if the module has it.
    Return [] if `folder` has no LogitScore module."""
    subfolder = read_modules(folder).get(LOGIT_SCORE)
    if subfolder is None:
        return []
    record = Record.read(folder / subfolder / "config.json")
    names = [name for name in ("true_token_id", "false_token_id") if record.data.get(name) is not None]
    return [record.integer(name, least=0) for name in names]


def list_ranking_files(folder: Path) -> list[Path]:
    """Return the paths of the existing files of sentence-transformers in the `folder` of a reranker."""
    scores = [folder / home / "config.json" for kind, home in read_modules(folder).items() if kind == LOGIT_SCORE]
    files = [folder / "modules.json", folder / _CONFIG, folder / _INPUTS, *scores]
    return [file for file in files if file.is_file()]


def find_unread_ranking(folder: Path) -> Iterator[LeftOut]:
    """Yield a part for each key that nothing reads in the files of `list_ranking_files(folder)`."""
    for file in list_ranking_files(folder):
        if (known_keys := _KNOWN.get(file.name)) is not None:
            yield from find_unread_entries(read_json(file), known_keys, str(file.relative_to(folder)))


def read_ranking(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry `rank` of graph.meta: how to build the input of a pair, and its score from the logit.

    activation: name of the function from logit to score, in lower case. template: whether the chat template builds the
    input of a pair. prompt: the instruction before the pair, or "".
    """
    record = _read_record(folder / _CONFIG)
    in_config = config.get("sentence_transformers")
    activation = in_config.get("activation_fn") if isinstance(in_config, Mapping) else None
    activation = activation or config.get("sbert_ce_default_activation_function") or record.data.get("activation_fn")
    modalities = _read_record(folder / _INPUTS).data.get("modality_config")
    template = (folder / "chat_template.jinja").is_file() and bool(read_modules(folder))
    prompts, name = record.record("prompts", {}), record.text("default_prompt_name", "") or ""
    return {
        "activation": str(activation or "Sigmoid").rpartition(".")[2].lower(),
        "template": template
        and ("message" in modalities if isinstance(modalities, Mapping) else bool(read_score_tokens(folder))),
        "prompt": prompts.text(name, "") if name else "",
    }


def read_modules(folder: Path) -> dict[str, str]:
    """Map the class of each module in modules.json of `folder` to the module's subfolder; {} without that file."""
    if not (folder / "modules.json").is_file():
        return {}
    entries = read_json(folder / "modules.json", list)
    return {str(m.get("type")).rpartition(".")[2]: str(m.get("path")) for m in entries if isinstance(m, Mapping)}


def _read_record(path: Path) -> Record:
    return Record.read(path) if path.is_file() else Record(path, {})


def check_tokens(tokens: list[int], vocab: int | None, source: str) -> None:
    """Raise WeftError, naming `source`, if one of `tokens` is at least `vocab`; None means no limit."""
    if invalid := [token for token in tokens if vocab is not None and token >= vocab]:
        raise WeftError(f"{source}: LogitScore reads token {invalid[0]}, but the model has only {vocab} tokens")
