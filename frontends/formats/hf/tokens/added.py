"""Tokens that files next to tokenizer.json name, put into it with the ids and flags that transformers gives them."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.backends.runtime.text.chat import EXTRA, special_tokens, text_of
from weft.backends.runtime.text.tokenizer import parse_tokenizer
from weft.ir.errors import WeftError
from weft.ir.storage.documents import Record, read_json, shown

if TYPE_CHECKING:
    from tokenizers import AddedToken

Described = dict[str, "AddedToken | None"]  # by text; without flags where it is only named
_MOST = 1 << 24  # where the largest id is far beyond, tokenizers takes gigabytes to write its file
VOCABULARY, CONFIG = "tokenizer.json", "tokenizer_config.json"
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
# What tokenizer_config.json says of the normalizer of BERT, and the name of it in tokenizer.json.
_BERT = (
    *(("do_lower_case", "lowercase"), ("strip_accents", "strip_accents")),
    ("tokenize_chinese_chars", "handle_chinese_chars"),
)


def merge_tokens(folder: Path, out: Path) -> dict[str, str]:
    """Let tokenizer.json of `out`, a copy of `folder`, hold what other files add, without truncation and padding.

    Returns the name of a padding token for tokenizer_config.json, if only tokenizer.json has one. As AutoTokenizer of
    transformers 5 does it, tokens get the next free ids, in the order of the ids that tokenizer_config.json lists, and
    add_bos_token and add_eos_token do not count where there is a tokenizer.json. Raises WeftError if a file is unsound.
    """
    path = folder / VOCABULARY
    stored, config = Record.read(path), Record(folder / CONFIG, special_tokens(folder))
    if config.flag("split_special_tokens", False):
        raise WeftError(f"{config.source}: split_special_tokens is not supported; remove it to keep such tokens whole")
    if wrong := next((text for text, i in _vocabulary(stored).items() if isinstance(i, int) and i >= _MOST), None):
        raise WeftError(f"{path}: the id of token {shown(wrong)} is {_MOST:,} or more, which no model's table reaches")
    added, normalizer = _missing(folder, stored, config), stored.get("normalizer", dict, {})
    changes: dict[str, Any] = {key: None for key in ("truncation", "padding") if stored.data.get(key)}
    if normalizer.get("type") == "BertNormalizer":
        said = {name: config.data[key] for key, name in _BERT if key in config}
        changes |= {"normalizer": normalizer | said} if normalizer | said != normalizer else {}
    if added or changes:
        tokenizer = parse_tokenizer(json.dumps({**stored.data, **changes}), path)
        tokenizer.add_tokens(added)
        (out / VOCABULARY).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    unnamed = "padding" in changes and config.data.get("pad_token") is None
    return {"pad_token": stored.record("padding").text("pad_token")} if unnamed else {}


def named_token(folder: Path, name: str) -> int | None:
    """The id of the special token that the tokenizer in `folder` calls `name` (eos_token); None if it has none."""
    text = text_of(special_tokens(folder).get(name))
    if text is None or not (folder / VOCABULARY).is_file():
        return None
    stored = Record.read(folder / VOCABULARY)
    ids = _vocabulary(stored) | {
        token.text("content"): token.integer("id") for token in stored.records("added_tokens", [])
    }
    return ids[text] if type(ids.get(text)) is int else None


def _vocabulary(stored: Record) -> dict[str, Any]:
    """The ids of tokens in `stored`, a tokenizer.json; empty for Unigram, which lists them."""
    vocab = stored.get("model", dict, {}).get("vocab")
    return vocab if isinstance(vocab, dict) else {}


def _missing(folder: Path, stored: Record, config: Record) -> list[AddedToken]:
    """The tokens that `stored`, a tokenizer.json, does not have, or has with other flags."""
    from tokenizers import AddedToken

    there = list(map(_token, stored.records("added_tokens", [])))
    named, extra = _named(config)
    listed = _listed(folder, config, named | extra)
    reprs = {repr(token) for token in there}
    found = {token.content: token for token in listed if repr(token) not in reprs}
    described = {token.content: token for token in (*there, *listed)}
    for text, token in (named | {text: token for text, token in extra.items() if text not in named}).items():
        if text not in described:
            found[text] = token or AddedToken(text, special=True)
        if text in found and text in named:
            found[text].special = True
    return list(found.values())


def _listed(folder: Path, config: Record, special: Collection[str]) -> list[AddedToken]:
    """The tokens that tokenizer_config.json, or else added_tokens.json, lists by their ids."""
    from tokenizers import AddedToken

    if "added_tokens_decoder" in config:
        tokens = config.record("added_tokens_decoder")
        return [_token(tokens.record(i)) for i in sorted(tokens.data, key=lambda i: int(i) if i.isdecimal() else -1)]
    older = folder / "added_tokens.json"
    ids: dict[str, int] = Record(older, {"": read_json(older)}).get("", dict[str, int]) if older.is_file() else {}
    kinds = {text: text in special for text in sorted(ids, key=ids.__getitem__)}
    return [AddedToken(text, special=on, normalized=not on) for text, on in kinds.items()]


def _named(config: Record) -> tuple[Described, Described]:
    """The special tokens that `config` gives a name, the usual ones first, and those that it only lists."""
    others = [key for key in config.data if key.endswith("_token") and key not in _NAMED]
    extra = next((config.data[key] for key in EXTRA if config.data.get(key)), None)
    named = [config.data.get(key) for key in (*_NAMED, *others)]
    if isinstance(extra, dict):
        named += extra.values()

    def described(tokens: list[Any]) -> Described:
        texts = {text: token for token in tokens if (text := text_of(token)) is not None}
        return {
            text: _token(Record(config.source, {"special": True, **token})) if isinstance(token, dict) else None
            for text, token in texts.items()
        }

    return described(named), described(extra if isinstance(extra, list) else [])


def _token(described: Record) -> AddedToken:
    from tokenizers import AddedToken

    flags = {name: described.flag(name) for name in _FLAGS if name in described}
    return AddedToken(described.text("content"), **flags)
