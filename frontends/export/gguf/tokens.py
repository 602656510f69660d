"""A tokenizer as GGUF metadata: that of the GGUF file a model came from, or made of its tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.backends.runtime.text.chat import read_templates, special_tokens, text_of
from weft.ir.errors import WeftError
from weft.ir.storage import scratch_folder
from weft.ir.storage.documents import read_json

from ...formats.gguf import GGUFTensors
from ...formats.gguf.splits import SPLITS
from ...formats.gguf.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from ...model import Model

_GPT2 = SPLITS["gpt-2"]
MOST_TOKENS = 1 << 24  # one far beyond the others would make gigabytes of fillers


def tokenizer_metadata(model: Model, rows: int, note: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The metadata that describe the tokenizer of `model`, whose embedding has `rows` rows; nothing if it has none.

    `note` is told of tokens that end an answer and have no key.

    Raises:
        WeftError: if it is of a kind that GGUF has no words for, or has more tokens than rows.
    """
    if (origin := model.origin("gguf")) is not None:
        metadata = GGUFTensors(origin).metadata
        found = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    elif model.tokenizer is None:
        return {}
    else:
        with scratch_folder() as scratch:
            model.tokenizer(scratch)
            found = _of_files(scratch, model, rows, note)
    if (count := len(found.get("tokenizer.ggml.tokens", ()))) > rows:
        raise WeftError(
            f"{model.spec}: its tokenizer has {count} tokens and its embedding {rows} rows, which llama.cpp does not "
            "load: resize the embedding (resize_token_embeddings of transformers)"
        )
    return found


def _of_files(folder: Path, model: Model, rows: int, note: Callable[[str], None]) -> dict[str, Any]:
    from tokenizers import Tokenizer

    if not (folder / "tokenizer.json").is_file():
        raise WeftError(f"{model.spec}: its tokenizer has no tokenizer.json, so GGUF metadata cannot be made of it")
    try:
        Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as e:  # tokenizers raises nothing more specific
        raise WeftError(f"{model.spec}: its tokenizer.json is not a readable tokenizer: {e}") from e
    read = read_json(folder / "tokenizer.json")
    templates, config = read_templates(folder)[1], special_tokens(folder)
    tokens, types = _tokens(read, model, rows)
    keys: dict[str, Any] = {"tokens": tokens, **_merging(read, tokens, types, model), "token_type": types}
    meta = model.graph.meta
    eos = meta.get("eos_token_ids") or [None]
    index = {token: i for i, token in enumerate(tokens)}
    unknown = read["model"].get("unk_token") or text_of(config.get("unk_token"))
    ids = {"bos": meta.get("bos_token_id"), "eos": eos[0], "padding": meta.get("pad_token_id")}
    # llama.cpp ends answers at these, too. Messages (eom) are told from turns (eot) by the text alone.
    further = sorted(eos[1:], key=lambda i: i < len(tokens) and "eom" in tokens[i])
    ids |= dict(zip(("eot", "eom"), further, strict=False))
    if further[2:]:
        note(
            f"a GGUF file names three tokens that end an answer, and the model has {len(eos)}: {further[2:]} are left "
            "out"
        )
    ids["unknown"] = index.get(unknown) if unknown else None
    keys |= {f"{name}_token_id": i for name, i in ids.items() if i is not None}
    keys["add_bos_token"] = _begins(read, ids["bos"], index)
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return named | {"tokenizer.chat_template" + f".{name}".removesuffix(".default"): t for name, t in templates.items()}


def _tokens(read: Mapping[str, Any], model: Model, rows: int) -> tuple[list[str], list[int]]:
    """Tokens by id, with fillers where the embedding has more rows than that, and their types."""
    vocab, added = read["model"].get("vocab"), {t["id"]: t for t in read.get("added_tokens", [])}
    if not isinstance(vocab, Mapping) or read["model"].get("type") != "BPE":
        other = read["model"].get("type")
        raise WeftError(
            f"{model.spec}: its tokenizer is {other}, and GGUF describes BPE; without tokenizer.json the file has none"
        )
    by_id = {i: token for token, i in vocab.items()} | {i: t["content"] for i, t in added.items()}
    count = max(max(by_id) + 1, rows)
    unknown = vocab.get(read["model"].get("unk_token"))

    def kind(i: int) -> int:
        if i == unknown:
            return UNKNOWN
        if i in added:
            return CONTROL if added[i]["special"] else USER_DEFINED
        if (token := by_id.get(i)) is None:
            return UNUSED
        return BYTE if len(token) == 6 and token.startswith("<0x") and read["model"].get("byte_fallback") else NORMAL

    if count > MOST_TOKENS:
        raise WeftError(
            f"{model.spec}: its tokenizer has a token {count - 1}, beyond the {MOST_TOKENS} that there may be"
        )
    return [by_id.get(i, f"[PAD{i}]") for i in range(count)], [kind(i) for i in range(count)]


def _merging(read: Mapping[str, Any], tokens: list[str], types: list[int], model: Model) -> dict[str, Any]:
    """Describe the tokenizer's model: ranked merges of bytes, or scores of a SentencePiece vocabulary."""
    merges = [m if isinstance(m, str) else " ".join(m) for m in read["model"]["merges"]]
    if read["model"].get("byte_fallback"):
        # Reversed: where several merges make one token, the first has the best rank and is written last.
        ranks = {merge.replace(" ", ""): -float(rank) for rank, merge in reversed(list(enumerate(merges)))}
        lowest = -float(len(merges))
        scores = [ranks.get(t, lowest) if kind == NORMAL else 0.0 for t, kind in zip(tokens, types, strict=True)]
        normalizer = json.dumps(read.get("normalizer")) + json.dumps(read.get("pre_tokenizer"))
        prefix = "Prepend" in normalizer or '"prepend_scheme": "first"' in normalizer or '"always"' in normalizer
        return {"model": "llama", "scores": scores, "add_space_prefix": prefix}
    return {"model": "gpt2", "pre": _split(read, model), "merges": merges, "add_space_prefix": False}


def _split(read: Mapping[str, Any], model: Model) -> str:
    """The name llama.cpp has for the way text is cut before merging."""
    outer = read.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    patterns: list[str] = []
    for step in steps:
        if step.get("type") == "Split":
            patterns.append(step["pattern"].get("Regex", step["pattern"].get("String")))
        elif step.get("type") == "Digits":
            patterns.append(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
        elif step.get("type") == "ByteLevel" and step.get("use_regex"):
            patterns += _GPT2
    found = next((name for name, split in SPLITS.items() if split == tuple(patterns) and name != "default"), None)
    if found is None:
        raise WeftError(f"{model.spec}: llama.cpp has no name for how the tokenizer cuts text, {patterns}")
    return found


def _begins(read: Mapping[str, Any], bos: int | None, index: Mapping[str, int]) -> bool:
    """Return whether encoding a text adds the bos token."""
    template = read.get("post_processor") or {}
    steps = [template, *template.get("processors", [])]
    starts = [s["single"][0].get("SpecialToken", {}).get("id") for s in steps if s.get("single")]
    return bos is not None and any(index.get(start) == bos for start in starts)
