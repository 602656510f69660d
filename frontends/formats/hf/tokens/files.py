"""The files of a tokenizer: which they are, and a copy of them that every library reads alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from weft.backends.runtime.text.chat import FURTHER, read_templates
from weft.backends.torch.transformers.embedding import write_json
from weft.ir.errors import WeftError
from weft.ir.storage.documents import Record, read_json

from ..hub import check_inside
from .added import CONFIG, VOCABULARY, merge_tokens

TEMPLATE = "chat_template.jinja"
_OLDER = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")  # of transformers 4
TOKENIZER_FILES = (
    *(VOCABULARY, CONFIG, "special_tokens_map.json", "added_tokens.json", TEMPLATE, "chat_template.json"),
    *_OLDER,
    "merges.txt",
)


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files in `folder`.

    Raises:
        WeftError: if one is a link that leads out of the folder: a copy of it would publish what it points to.
    """
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    files += sorted((folder / FURTHER).glob("*.jinja"))
    for file in files:
        check_inside(folder, file)
    return files


def copy_tokenizer(folder: Path, out: Path, types: bool = True, lower: bool = False, plain: bool = False) -> None:
    """Copy the tokenizer's files from `folder` to the folder `out`, where each says all.

    tokenizer.json has the tokens that only other files name, and neither cuts nor pads; with `lower` it makes texts
    lower-case, with `plain` it puts no tokens around them. A config without a class gets the general one, for a model
    that reads token `types` or none. Chat templates of
    tokenizer_config.json that onnxruntime-genai cannot read, because there are several, become files of their own.
    Raises WeftError if a file is unsound.
    """
    for file in tokenizer_files(folder):
        copy = out / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    before = read_json(out / CONFIG) if (out / CONFIG).is_file() else {}
    config = dict(before)
    if (out / VOCABULARY).is_file():
        if "tokenizer_class" not in config:  # else transformers takes that of the model's type, which may be weft's own
            inputs = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs} | config
        config |= merge_tokens(folder, out)
        if lower or plain:
            tokenizer = read_json(out / VOCABULARY)
            own, case = tokenizer.get("normalizer"), [{"type": "Lowercase"}] * lower
            tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [*case, *filter(None, [own])]}
            if plain:
                tokenizer["post_processor"] = None
                for token in Record(out / VOCABULARY, tokenizer).records("added_tokens", [])[:1]:
                    config.setdefault("pad_token", token.text("content"))  # without one transformers cannot pad
            (out / VOCABULARY).write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    elif other := next((name for name in _OLDER if (folder / name).is_file()), None):
        raise WeftError(
            f"{folder} has {other} and no {VOCABULARY}, which is what weft reads: make it with transformers, "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}), or move {other} away, "
            "for a model of token ids alone"
        )
    _write_templates(out, config)
    if config != before:
        write_json(out / CONFIG, config)


def _write_templates(folder: Path, config: dict[str, Any]) -> None:
    """Write chat templates into files, unless they are, or `config` has one alone, which stays there."""
    path, templates = read_templates(folder)
    if path.suffix == ".json" and not isinstance(config.get("chat_template"), str):
        for name, text in templates.items():
            file = folder / TEMPLATE if name == "default" else folder / FURTHER / f"{name}.jinja"
            if file.parent.resolve() not in (folder.resolve(), (folder / FURTHER).resolve()):
                raise WeftError(f"{path}: a chat template cannot be called {name!r}")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="")
    if "chat_template" in config and (path.suffix != ".json" or not isinstance(config["chat_template"], str)):
        del config["chat_template"]  # genai would read it, and transformers does not
