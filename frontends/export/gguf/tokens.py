"""A tokenizer as GGUF metadata: copied from the GGUF file that a model came from, or built from tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.backends.runtime.text.chat import get_token_text, read_special_tokens, read_templates
from weft.ir.errors import WeftError
from weft.ir.storage import scratch_folder
from weft.ir.storage.documents import read_json

from ...formats.gguf import GGUFTensors
from ...formats.gguf.splits import SPLITS
from ...formats.gguf.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from ...model import Model

_GPT2 = SPLITS["gpt-2"]
MOST_TOKENS = 1 << 24  # an outlying id would create gigabytes of filler tokens


def build_tokenizer_metadata(model: Model, rows: int, note: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Return the GGUF metadata of the tokenizer of `model`, whose embedding has `rows` rows; {} without a tokenizer.

    `note` reports tokens that end an answer but have no key.

    Raises:
        WeftError: if GGUF has no keys for this kind of tokenizer, or it has no valid tokenizer.json or more tokens than
            `rows`.
    """
    if (origin := model.origin("gguf")) is not None:
        described = {k: value for k, value in GGUFTensors(origin).metadata.items() if k.startswith("tokenizer.")}
    elif model.tokenizer is None:
        return {}
    else:
        with scratch_folder() as scratch:
            model.tokenizer(scratch)
            described = _convert_files(scratch, model, rows, note)
    if (count := len(described.get("tokenizer.ggml.tokens", ()))) > rows:
        raise WeftError(
            f"{model.spec}: the tokenizer has {count} tokens, but the embedding only {rows} rows: resize the embedding "
            "(resize_token_embeddings of transformers)"
        )
    return described


def _convert_files(folder: Path, model: Model, rows: int, note: Callable[[str], None]) -> dict[str, Any]:
    from tokenizers import Tokenizer

    if not (folder / "tokenizer.json").is_file():
        raise WeftError(
            f"{model.spec}: the tokenizer has no tokenizer.json, which GGUF needs: export without the tokenizer files"
        )
    try:
        Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as e:  # tokenizers raises nothing more specific
        raise WeftError(f"{model.spec}: its tokenizer.json is not a readable tokenizer: {e}") from e
    tokenizer = read_json(folder / "tokenizer.json")
    templates, config = read_templates(folder)[1], read_special_tokens(folder)
    tokens, types = _read_tokens(tokenizer, model, rows)
    keys: dict[str, Any] = {"tokens": tokens, **_list_model_keys(tokenizer, tokens, types, model), "token_type": types}
    meta = model.graph.meta
    eos = meta.get("eos_token_ids") or [None]
    index = {token: i for i, token in enumerate(tokens)}
    unknown = tokenizer["model"].get("unk_token") or get_token_text(config.get("unk_token"))
    ids = {"bos": meta.get("bos_token_id"), "eos": eos[0], "padding": meta.get("pad_token_id")}
    # llama.cpp also ends answers at these. Only the name distinguishes ends of messages (eom) from ends of turns (eot).
    more_ends = sorted(eos[1:], key=lambda i: i < len(tokens) and "eom" in tokens[i])
    ids |= dict(zip(("eot", "eom"), more_ends, strict=False))
    if more_ends[2:]:
        note(
            f"end tokens {more_ends[2:]} are left out: a GGUF file names three tokens that end an answer, and the "
            f"model has {len(eos)}"
        )
    ids["unknown"] = index.get(unknown) if unknown else None
    keys |= {f"{name}_token_id": i for name, i in ids.items() if i is not None}
    keys["add_bos_token"] = _adds_bos(tokenizer, ids["bos"], index)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    metadata |= {"tokenizer.chat_template" + f".{name}".removesuffix(".default"): t for name, t in templates.items()}
    return metadata


def _read_tokens(tokenizer: Mapping[str, Any], model: Model, rows: int) -> tuple[list[str], list[int]]:
    """Return the tokens in order of ids, with fillers up to `rows`, and their types; raise WeftError if not BPE."""
    vocab, added = tokenizer["model"].get("vocab"), {t["id"]: t for t in tokenizer.get("added_tokens", [])}
    if not isinstance(vocab, Mapping) or tokenizer["model"].get("type") != "BPE":
        kind_name = tokenizer["model"].get("type")
        raise WeftError(
            f"{model.spec}: its tokenizer is {kind_name}, but weft writes only BPE tokenizers to GGUF: "
            "export without the tokenizer files"
        )
    by_id = {i: token for token, i in vocab.items()} | {i: t["content"] for i, t in added.items()}
    count = max(max(by_id) + 1, rows)
    unknown = vocab.get(tokenizer["model"].get("unk_token"))

    def kind(i: int) -> int:
        if i == unknown:
            return UNKNOWN
        if i in added:
            return CONTROL if added[i]["special"] else USER_DEFINED
        if (token := by_id.get(i)) is None:
            return UNUSED
        is_byte = len(token) == 6 and token.startswith("<0x") and tokenizer["model"].get("byte_fallback")
        return BYTE if is_byte else NORMAL

    if count > MOST_TOKENS:
        raise WeftError(f"{model.spec}: the vocabulary has {count} entries, above the limit {MOST_TOKENS}")
    return [by_id.get(i, f"[PAD{i}]") for i in range(count)], [kind(i) for i in range(count)]


def _list_model_keys(tokenizer: Mapping[str, Any], tokens: list[str], types: list[int], model: Model) -> dict[str, Any]:
    """Return the keys of the tokenizer's model: ranked merges of bytes, or scores of a SentencePiece vocabulary."""
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    if tokenizer["model"].get("byte_fallback"):
        # Reversed: if several merges form one token, the first has the best rank and is written last.
        ranks = {merge.replace(" ", ""): -float(rank) for rank, merge in reversed(list(enumerate(merges)))}
        lowest = -float(len(merges))
        scores = [ranks.get(t, lowest) if kind == NORMAL else 0.0 for t, kind in zip(tokens, types, strict=True)]
        normalizer = json.dumps(tokenizer.get("normalizer")) + json.dumps(tokenizer.get("pre_tokenizer"))
        prefix = "Prepend" in normalizer or '"prepend_scheme": "first"' in normalizer or '"always"' in normalizer
        return {"model": "llama", "scores": scores, "add_space_prefix": prefix}
    return {"model": "gpt2", "pre": _find_split(tokenizer, model), "merges": merges, "add_space_prefix": False}


def _find_split(tokenizer: Mapping[str, Any], model: Model) -> str:
    outer = tokenizer.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    patterns: list[str] = []
    for step in steps:
        if step.get("type") == "Split":
            patterns.append(step["pattern"].get("Regex", step["pattern"].get("String")))
        elif step.get("type") == "Digits":
            patterns.append(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
        elif step.get("type") == "ByteLevel" and step.get("use_regex"):
            patterns += _GPT2
    match = next((name for name, rules in SPLITS.items() if rules == tuple(patterns) and name != "default"), None)
    if match is None:
        raise WeftError(f"{model.spec}: llama.cpp does not support the tokenizer's split of text by {patterns}")
    return match


def _adds_bos(tokenizer: Mapping[str, Any], bos: int | None, index: Mapping[str, int]) -> bool:
    template = tokenizer.get("post_processor") or {}
    steps = [template, *template.get("processors", [])]
    starts = [s["single"][0].get("SpecialToken", {}).get("id") for s in steps if s.get("single")]
    return bos is not None and any(index.get(start) == bos for start in starts)
