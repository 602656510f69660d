"""The files of a tokenizer: which they are, and a copy of them that every library reads alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from weft.backends.runtime.text.chat import FURTHER, read_templates
from weft.ir.documents import read_json
from weft.ir.errors import WeftError

from .added import CONFIG, VOCABULARY, merge_tokens

TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    *(VOCABULARY, CONFIG, "special_tokens_map.json", "added_tokens.json", TEMPLATE, "chat_template.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"),
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


def check_inside(folder: Path, file: Path) -> None:
    """Check that `file` lies in `folder`, links followed; the hub's snapshots and their folders link to blobs.

    Raises:
        WeftError: if it does not.
    """
    home, real = folder.resolve(), file.resolve()
    root = next((at.parent for at in home.parents if at.name == "snapshots"), home)
    if not real.is_relative_to(root):
        raise WeftError(f"{file} is a link to {real}, outside of the model's folder: copy the file if it belongs there")


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copy the tokenizer's files from `folder` to the folder `out`, where each says all.

    tokenizer.json has the tokens that only other files name, and neither cuts nor pads. Chat templates of
    tokenizer_config.json that onnxruntime-genai cannot read, because there are several, become files of their own.

    Raises:
        WeftError: if a file is unsound.
    """
    for file in tokenizer_files(folder):
        copy = out / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if (out / VOCABULARY).is_file():
        merge_tokens(folder, out)
        if not (out / CONFIG).is_file():  # without it, transformers asks whether to run the code of a custom model
            write_json(out / CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write_templates(out)


def _write_templates(folder: Path) -> None:
    """Write chat templates into files, unless they are, or tokenizer_config.json has one alone."""
    path, templates = read_templates(folder)
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if path.suffix == ".json" and not isinstance(config.get("chat_template"), str):
        for name, text in templates.items():
            file = folder / TEMPLATE if name == "default" else folder / FURTHER / f"{name}.jinja"
            if file.parent.resolve() not in (folder.resolve(), (folder / FURTHER).resolve()):
                raise WeftError(f"{path}: a chat template cannot be called {name!r}")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="")
    if "chat_template" in config and (path.suffix != ".json" or not isinstance(config["chat_template"], str)):
        del config["chat_template"]  # genai would read it, and transformers does not
        write_json(folder / CONFIG, config)


def write_json(path: Path, value: object) -> None:
    """Write `value` as JSON, as transformers does."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
