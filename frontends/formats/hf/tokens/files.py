"""The files of a tokenizer: list them, and copy them so that all libraries tokenize alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from weft.backends.runtime.text.chat import TEMPLATE_FOLDER, read_templates
from weft.ir.errors import WeftError
from weft.ir.storage.documents import Record, read_json, write_json

from ..hub import check_inside
from .added import CONFIG, VOCABULARY, merge_added_tokens

TEMPLATE = "chat_template.jinja"
_OLDER = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")  # of transformers 4
TOKENIZER_FILES = (
    *(VOCABULARY, CONFIG, "special_tokens_map.json", "added_tokens.json", TEMPLATE, "chat_template.json"),
    *_OLDER,
    "merges.txt",
)


def list_tokenizer_files(folder: Path) -> list[Path]:
    """Return the paths of the tokenizer's files that exist in `folder`.

    Raises:
        WeftError: if one is a link to a file outside the folder: a copy would publish that file.
    """
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    files += sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))
    for file in files:
        check_inside(folder, file)
    return files


def copy_tokenizer(folder: Path, out: Path, types: bool = True, lower: bool = False, plain: bool = False) -> None:
    """Copy the tokenizer's files from `folder` to the folder `out`, and complete the copies.

    tokenizer.json gets the tokens that only other files name, and neither truncates nor pads; with `lower` it
    lower-cases its input, with `plain` it adds no special tokens (and the config gets a pad_token if it has none). A
    config without a class gets PreTrainedTokenizerFast, with token types if `types`. Several chat templates in
    tokenizer_config.json become separate files, as onnxruntime-genai cannot read them there.

    Raises:
        WeftError: if a file is invalid, or there is an older vocabulary file but no tokenizer.json.
    """
    for file in list_tokenizer_files(folder):
        copy = out / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    original = read_json(out / CONFIG) if (out / CONFIG).is_file() else {}
    config = dict(original)
    if (out / VOCABULARY).is_file():
        if "tokenizer_class" not in config:  # else transformers uses the class of the model type, which may be weft's
            inputs = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs} | config
        config |= merge_added_tokens(folder, out)
        if lower or plain:
            tokenizer = read_json(out / VOCABULARY)
            normalizer, case = tokenizer.get("normalizer"), [{"type": "Lowercase"}] * lower
            tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [*case, *filter(None, [normalizer])]}
            if plain:
                tokenizer["post_processor"] = None
                for token in Record(out / VOCABULARY, tokenizer).records("added_tokens", [])[:1]:
                    config.setdefault("pad_token", token.text("content"))  # without one transformers cannot pad
            (out / VOCABULARY).write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    elif older := next((name for name in _OLDER if (folder / name).is_file()), None):
        raise WeftError(
            f"{folder} has {older} but no {VOCABULARY}, which weft needs: create it with transformers, "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}), or move {older} away "
            "to compile the model without a tokenizer"
        )
    _write_templates(out, config)
    if config != original:
        write_json(out / CONFIG, config)


def _write_templates(folder: Path, config: dict[str, Any]) -> None:
    """Write the chat templates of JSON files in `folder` into separate files; a single one stays in `config`."""
    path, templates = read_templates(folder)
    if path.suffix == ".json" and not isinstance(config.get("chat_template"), str):
        for name, text in templates.items():
            file = folder / TEMPLATE if name == "default" else folder / TEMPLATE_FOLDER / f"{name}.jinja"
            if file.parent.resolve() not in (folder.resolve(), (folder / TEMPLATE_FOLDER).resolve()):
                raise WeftError(f"{path}: {name!r} is not a valid name of a chat template")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="")
    if "chat_template" in config and (path.suffix != ".json" or not isinstance(config["chat_template"], str)):
        del config["chat_template"]  # genai would read it, and transformers does not
