"""Add to tokenizer.json the tokens that only other tokenizer files name, with the ids and flags of transformers."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.backends.runtime.text.chat import EXTRA, get_token_text, read_special_tokens
from weft.backends.runtime.text.tokenizer import parse_tokenizer
from weft.ir.errors import WeftError
from weft.ir.storage.documents import Record, quote_value, read_json

if TYPE_CHECKING:
    from tokenizers import AddedToken

Described = dict[str, "AddedToken | None"]  # tokens by content; None for a token without flags
_MAX_ID = 1 << 24  # above this id, tokenizers would use gigabytes to write its file
VOCABULARY, CONFIG = "tokenizer.json", "tokenizer_config.json"
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
# Keys of BERT's normalizer in tokenizer_config.json, and their names in tokenizer.json.
_BERT = (
    *(("do_lower_case", "lowercase"), ("strip_accents", "strip_accents")),
    ("tokenize_chinese_chars", "handle_chinese_chars"),
)


def merge_added_tokens(folder: Path, out: Path) -> dict[str, str]:
    """Add the tokens that only other files name to tokenizer.json of `out`, a copy of `folder`.

    Also remove truncation and padding from it, and set its BertNormalizer as tokenizer_config.json states. Return
    {"pad_token": …} for that config if only the removed padding named one, else {}. As in AutoTokenizer of transformers
    5, tokens get the next free ids, in the config's order of ids; add_bos_token and add_eos_token have no effect.

    Raises:
        WeftError: if a file is invalid, or the config sets split_special_tokens.
    """
    path = folder / VOCABULARY
    stored, config = Record.read(path), Record(folder / CONFIG, read_special_tokens(folder))
    if config.flag("split_special_tokens", False):
        raise WeftError(f"{config.source}: split_special_tokens=True is not supported: remove it to keep tokens whole")
    if invalid := next((text for text, i in _read_vocab(stored).items() if isinstance(i, int) and i >= _MAX_ID), None):
        raise WeftError(f"{path}: the id of token {quote_value(invalid)} must be below {_MAX_ID:,}")
    added, normalizer = _find_missing(folder, stored, config), stored.get("normalizer", dict, {})
    changes: dict[str, Any] = {key: None for key in ("truncation", "padding") if stored.data.get(key)}
    if normalizer.get("type") == "BertNormalizer":
        settings = {name: config.data[key] for key, name in _BERT if key in config}
        changes |= {"normalizer": normalizer | settings} if normalizer | settings != normalizer else {}
    if added or changes:
        tokenizer = parse_tokenizer(json.dumps({**stored.data, **changes}), path)
        tokenizer.add_tokens(added)
        (out / VOCABULARY).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    lacks_padding = "padding" in changes and config.data.get("pad_token") is None
    return {"pad_token": stored.record("padding").text("pad_token")} if lacks_padding else {}


def find_token(folder: Path, name: str) -> int | None:
    """Return the id of the special token `name` (such as eos_token) in the tokenizer files of `folder`, or None."""
    text = get_token_text(read_special_tokens(folder).get(name))
    if text is None or not (folder / VOCABULARY).is_file():
        return None
    stored = Record.read(folder / VOCABULARY)
    ids = _read_vocab(stored) | {t.text("content"): t.integer("id") for t in stored.records("added_tokens", [])}
    return ids[text] if type(ids.get(text)) is int else None


def _read_vocab(stored: Record) -> dict[str, Any]:
    """Return token → id of `stored`, a tokenizer.json, without added tokens; {} for Unigram (it has a list)."""
    vocab = stored.get("model", dict, {}).get("vocab")
    return vocab if isinstance(vocab, dict) else {}


def _find_missing(folder: Path, stored: Record, config: Record) -> list[AddedToken]:
    """Return the tokens of `config` and of `folder` that `stored` (tokenizer.json) lacks or has with other flags."""
    from tokenizers import AddedToken

    present = list(map(_build_token, stored.records("added_tokens", [])))
    named, extra = _find_named(config)
    listed = _list_added(folder, config, named | extra)
    reprs = {repr(token) for token in present}
    missing = {token.content: token for token in listed if repr(token) not in reprs}
    described = {token.content: token for token in (*present, *listed)}
    for text, token in (named | {text: token for text, token in extra.items() if text not in named}).items():
        if text not in described:
            missing[text] = token or AddedToken(text, special=True)
        if text in missing and text in named:
            missing[text].special = True
    return list(missing.values())


def _list_added(folder: Path, config: Record, special: Collection[str]) -> list[AddedToken]:
    """Return the added tokens of `config`, else of added_tokens.json (special if in `special`), in order of ids."""
    from tokenizers import AddedToken

    if "added_tokens_decoder" in config:
        tokens = config.record("added_tokens_decoder")
        order = sorted(tokens.data, key=lambda i: int(i) if i.isdecimal() else -1)
        return [_build_token(tokens.record(i)) for i in order]
    older = folder / "added_tokens.json"
    ids: dict[str, int] = Record(older, {"": read_json(older)}).get("", dict[str, int]) if older.is_file() else {}
    kinds = {text: text in special for text in sorted(ids, key=ids.__getitem__)}
    return [AddedToken(text, special=on, normalized=not on) for text, on in kinds.items()]


def _find_named(config: Record) -> tuple[Described, Described]:
    """Return the special tokens that `config` names (eos_token, …), and those that it lists without a name."""
    more_keys = [key for key in config.data if key.endswith("_token") and key not in _NAMED]
    extra = next((config.data[key] for key in EXTRA if config.data.get(key)), None)
    named = [config.data.get(key) for key in (*_NAMED, *more_keys)]
    if isinstance(extra, dict):
        named += extra.values()

    def describe_tokens(tokens: list[Any]) -> Described:
        texts = {text: token for token in tokens if (text := get_token_text(token)) is not None}
        return {
            text: _build_token(Record(config.source, {"special": True, **token})) if isinstance(token, dict) else None
            for text, token in texts.items()
        }

    return describe_tokens(named), describe_tokens(extra if isinstance(extra, list) else [])


def _build_token(described: Record) -> AddedToken:
    from tokenizers import AddedToken

    flags = {name: described.flag(name) for name in _FLAGS if name in described}
    return AddedToken(described.text("content"), **flags)
