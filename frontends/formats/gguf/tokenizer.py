"""Write the tokenizer in GGUF metadata as Hugging Face tokenizer files.

GGUF describes a tokenizer in llama.cpp's terms: a kind (`tokenizer.ggml.model`), tokens with types and scores, merges.
The files load in `tokenizers`, in `transformers` and, except WordPiece, in onnxruntime-genai.

onnxruntime-genai 0.18 replaces a few regular expressions by matchers of its own, so it splits some strings differently
for any tokenizer.json: a space before a line break and several spaces (llama-bpe, qwen2), letters without case before
capitals (tekken, gpt-4o); with SentencePiece, words of over 100 letters and, with a space prefix, runs of spaces inside
a string, where its decoder also keeps the prefix. It cannot read expressions of several steps, of scripts or of phrases
(deepseek-v3, kimi-k2, afmoe, exaone-moe). Its `encode` never adds BOS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import Record, matches_type, name_type, quote_value, write_json

from .splits import SPLITS, WHOLE_PIECES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Metadata = Mapping[str, Any]

# Token types of the specification.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Tokens that end a turn, whichever token the file names as EOS (llama.cpp's list; older files name only one).
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<EOT>")
# Default ids of files that leave them out, by tokenizer kind (the format spells it "seperator").
_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "bert": {"bos": 101, "eos": 102, "unknown": 100, "padding": 0, "mask": 103},
}


@dataclass(frozen=True)
class TokenIds:
    """The ids of the tokens that begin, end and pad a sequence; None for a token that the tokenizer lacks. eos: all
    tokens that end generation, the file's EOS first. add_bos, add_eos: encoding adds BOS, or the first of eos."""

    bos: int | None
    eos: list[int]
    pad: int | None
    add_bos: bool
    add_eos: bool


def has_tokenizer(metadata: Metadata) -> bool:
    """Return whether the GGUF `metadata` describes a tokenizer."""
    return any(key.startswith("tokenizer.") for key in metadata)


def read_token_ids(metadata: Metadata) -> TokenIds:
    """Return the special token ids and flags in GGUF `metadata`, with the defaults of the tokenizer's kind.

    Raises:
        WeftError: if the metadata has no tokenizer, one of an unknown kind or pre-tokenizer, or an id outside its
            vocabulary.
    """
    vocab = _Vocab(metadata)
    bos, eos = vocab.begin_id, vocab.end_id
    ends = [eos, vocab.find_id("eot"), vocab.find_id("eom"), *(vocab.index.get(text) for text in _TURN_ENDS)]
    begins = vocab.kind in ("llama", "bert") or vocab.pre in WHOLE_PIECES
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", begins)) and bos is not None
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", vocab.kind in ("bert", "t5"))) and eos is not None
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    return TokenIds(bos, unique, vocab.find_id("padding"), add_bos, add_eos)


def write_tokenizer(metadata: Metadata, out_dir: Path) -> None:
    """Write the tokenizer of GGUF `metadata` into folder `out_dir`, which is created if missing.

    Files: tokenizer.json, tokenizer_config.json, special_tokens_map.json and, if the metadata has a chat template,
    chat_template.jinja. Kinds: byte-level BPE (`gpt2`), SentencePiece BPE (`llama`, merges recovered from the scores;
    `gemma4`, whose files have merges), SentencePiece Unigram (`t5`) and WordPiece (`bert`).

    Raises:
        WeftError: if the metadata describes no tokenizer, one of an unknown kind or pre-tokenizer, or is inconsistent.
    """
    vocab, ids = _Vocab(metadata), read_token_ids(metadata)
    tokenizer = _KINDS[vocab.kind](vocab)
    added = _add_tokens(tokenizer, vocab)
    begin = [vocab.tokens[ids.bos]] if ids.add_bos and ids.bos is not None else []
    end = [vocab.tokens[ids.eos[0]]] if ids.add_eos else []
    if begin or end:
        tokenizer.post_processor = _build_template(vocab, begin, end)
    names = {"bos": ids.bos, "eos": ids.eos[0] if ids.eos else None, "unk": vocab.find_id("unknown"), "pad": ids.pad}
    if vocab.kind == "bert":
        names |= {"cls": vocab.begin_id, "sep": vocab.end_id, "mask": vocab.find_id("mask")}
    special = {f"{name}_token": vocab.tokens[index] for name, index in names.items() if index is not None}
    architecture = metadata.get("general.architecture", "")
    config = {
        "tokenizer_class": "BertTokenizer" if vocab.kind == "bert" else "PreTrainedTokenizerFast",
        **special,
        "add_bos_token": ids.add_bos,
        "add_eos_token": ids.add_eos,
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": vocab.kind == "bert",
        "model_max_length": metadata.get(f"{architecture}.context_length", 10**30),  # transformers' "no limit"
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    text = tokenizer.to_str(pretty=True)  # its own save() reports a full disk as a bare Exception
    (out_dir / "tokenizer.json").write_text(text, encoding="utf-8")
    write_json(out_dir / "tokenizer_config.json", config)
    write_json(out_dir / "special_tokens_map.json", special)
    if template := Record("the GGUF metadata", metadata).text("tokenizer.chat_template", ""):
        (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


class _Vocab:
    """The vocabulary in GGUF `metadata`, with its token types, scores and merges; invalid values raise WeftError."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.kind: str = self.read("model", str)
        if self.kind not in _KINDS:
            raise WeftError(f"tokenizer.ggml.model={quote_value(self.kind)} is unknown; known are {', '.join(_KINDS)}")
        self.pre: str = self.read("pre", str, "default")
        if self.kind == "gpt2" and self.pre not in SPLITS:
            known = ", ".join(sorted(SPLITS))
            raise WeftError(f"tokenizer.ggml.pre={quote_value(self.pre)} is unknown; known are {known}")
        tokens = self.read_strings("tokens")
        self.types: list[int] = self.read("token_type", list[int], [NORMAL] * len(tokens))
        if len(self.types) != len(tokens):
            raise WeftError(f"tokenizer.ggml.token_type has {len(self.types)} entries instead of {len(tokens)}")
        self.tokens = list(map(_mark_continuation, tokens, self.types)) if self.kind == "bert" else tokens
        self.index = {token: index for index, token in enumerate(self.tokens)}
        if len(self.index) < len(self.tokens):
            repeated = next(token for index, token in enumerate(self.tokens) if self.index[token] != index)
            raise WeftError(f"tokenizer.ggml.tokens has {quote_value(repeated)} twice, so its id is ambiguous")
        # llama.cpp renamed BERT's [CLS] and [SEP] keys over time
        self.begin_id = self.find_id("cls", "bos") if self.kind == "bert" else self.find_id("bos")
        self.end_id = self.find_id("seperator", "eos") if self.kind == "bert" else self.find_id("eos")

    def read(self, key: str, kind: Any, *default: Any) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}", *default)
        if not matches_type(value, kind):
            fault = "is missing" if value is None else f"is {quote_value(value)}, not of type {name_type(kind)}"
            raise WeftError(f"tokenizer.ggml.{key} {fault} in the GGUF metadata, so the tokenizer cannot be rebuilt")
        return value

    def read_strings(self, key: str) -> list[str]:
        values = self.read(key, list)
        wrong = next((index for index, value in enumerate(values) if not isinstance(value, str)), None)
        if wrong is not None:
            raise WeftError(f"tokenizer.ggml.{key}[{wrong}] is {quote_value(values[wrong])}, not text")
        return [value or f"[EMPTY_{index}]" for index, value in enumerate(values)]  # llama.cpp's name for them

    def find_id(self, *names: str) -> int | None:
        """Return the id of the first of `names` that the metadata has, else the default of the tokenizer's kind for the
        last name, else None."""
        for name in names:
            token = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
            if token is None:
                continue
            if not matches_type(token, int) or not 0 <= token < len(self.tokens):
                raise WeftError(
                    f"tokenizer.ggml.{name}_token_id is {quote_value(token)}, outside the {len(self.tokens)} tokens"
                )
            return int(token)
        default = _DEFAULT_IDS.get(self.kind, {}).get(names[-1])
        return default if default is not None and default < len(self.tokens) else None

    def read_merges(self) -> list[tuple[str, str]]:
        """Return the pairs of tokens that BPE merges, in order of priority."""
        pairs: list[tuple[str, str]] = []
        for index, merge in enumerate(self.read_strings("merges")):
            # From 1: the left token is not empty, so a leading blank belongs to it.
            cut = merge.find(" ", 1)
            pair = (merge[:cut], merge[cut + 1 :])
            if cut < 0 or not {*pair, "".join(pair)} <= self.index.keys():
                raise WeftError(
                    f"tokenizer.ggml.merges[{index}]={quote_value(merge)} must be two tokens that join into a third"
                )
            pairs.append(pair)
        return pairs

    def read_scores(self) -> list[float]:
        scores: list[float] = self.read("scores", list[float])
        if len(scores) != len(self.tokens):
            raise WeftError(f"tokenizer.ggml.scores has {len(scores)} entries instead of {len(self.tokens)}")
        return scores

    def derive_merges(self) -> list[tuple[str, str]]:
        """Return the BPE merges in a SentencePiece vocabulary: all splits of a piece into two pieces, best score
        first."""
        entries = zip(self.tokens, self.read_scores(), self.types, strict=True)
        pieces = {token: score for token, score, kind in entries if kind not in _NEVER_MERGED}
        ranked = sorted(pieces, key=lambda piece: -pieces[piece])
        return [
            (piece[:cut], piece[cut:])
            for piece in ranked
            for cut in range(len(piece) - 1, 0, -1)  # longest left first: at equal score SentencePiece merges leftmost
            if piece[:cut] in pieces and piece[cut:] in pieces
        ]


_NEVER_MERGED = (UNKNOWN, CONTROL, BYTE)


def _mark_continuation(token: str, kind: int) -> str:
    # Hugging Face marks continuations with ##, GGUF marks beginnings with ▁.
    if kind in (UNKNOWN, CONTROL, USER_DEFINED) or (token.startswith("[") and token.endswith("]")):
        return token
    return token[1:] if token.startswith("▁") else f"##{token}"


def _build_byte_level(vocab: _Vocab) -> Tokenizer:
    """Build a byte-level BPE tokenizer (GPT-2) that splits words by the regular expressions `SPLITS[vocab.pre]`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    model = models.BPE(vocab=vocab.index, merges=vocab.read_merges(), ignore_merges=vocab.pre in WHOLE_PIECES)
    tokenizer = Tokenizer(model)
    steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[vocab.pre]]
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, spelling])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece(vocab: _Vocab) -> Tokenizer:
    """Build a SentencePiece BPE tokenizer: spaces become ▁, and text is not cut into words before merging. Unknown
    characters become bytes if the vocabulary has all 256, else the unknown token."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = vocab.find_id("unknown")
    byte_fallback = all(f"<0x{byte:02X}>" in vocab.index for byte in range(256))
    merges = vocab.read_merges() if "tokenizer.ggml.merges" in vocab.metadata else vocab.derive_merges()
    unk_token = None if unknown is None else vocab.tokens[unknown]
    model = models.BPE(vocab.index, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=byte_fallback)
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocab.metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        # After that replacement no space is left to split at; onnxruntime-genai reads this as "do not cut into words".
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
        tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _build_unigram(vocab: _Vocab) -> Tokenizer:
    """Build a SentencePiece Unigram tokenizer (Kudo 2018): a string becomes the pieces with the best sum of scores."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = list(zip(vocab.tokens, vocab.read_scores(), strict=True))
    byte_fallback = all(f"<0x{byte:02X}>" in vocab.index for byte in range(256))
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=vocab.find_id("unknown"), byte_fallback=byte_fallback))
    steps: list[normalizers.Normalizer] = []
    if table := vocab.read("precompiled_charsmap", list[int], []):  # replacements of characters, such as wide digits
        try:
            steps.append(normalizers.Precompiled(bytes(table)))
        except Exception as e:  # the class that the library raises
            raise WeftError(f"tokenizer.ggml.precompiled_charsmap is damaged: {e}") from None
    if vocab.read("remove_extra_whitespaces", bool, True):
        steps += [normalizers.Replace(Regex(space), to) for space, to in (("^ +| +$", ""), (" {2,}", " "))]
    tokenizer.normalizer = normalizers.Sequence(steps)
    prefix = "always" if vocab.read("add_space_prefix", bool, True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prefix)
    tokenizer.decoder = decoders.Metaspace("▁", prefix)
    return tokenizer


def _build_wordpiece(vocab: _Vocab) -> Tokenizer:
    """Build a WordPiece tokenizer (BERT, uncased)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = vocab.find_id("unknown")
    unk_token = "[UNK]" if unknown is None else vocab.tokens[unknown]
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab.index, unk_token=unk_token))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


_KINDS: dict[str, Callable[[_Vocab], Tokenizer]] = {
    "gpt2": _build_byte_level,
    "llama": _build_sentencepiece,
    "t5": _build_unigram,
    "bert": _build_wordpiece,
    "gemma4": _build_sentencepiece,  # with ranked merges
}


def _add_tokens(tokenizer: Tokenizer, vocab: _Vocab) -> dict[str, dict[str, Any]]:
    """Add special and user-defined tokens to `tokenizer`; return them as added_tokens_decoder, keyed by id."""
    from tokenizers import AddedToken

    special_ids = {vocab.begin_id, vocab.end_id, vocab.find_id("mask")}
    added: dict[int, bool] = {}  # id -> special
    for index, (text, kind) in enumerate(zip(vocab.tokens, vocab.types, strict=True)):
        special = kind in (CONTROL, UNKNOWN) or text in _TURN_ENDS or index in special_ids
        if special or kind == USER_DEFINED:
            added[index] = special
    tokenizer.add_tokens([AddedToken(vocab.tokens[i], normalized=False, special=added[i]) for i in added])
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {str(i): {"content": vocab.tokens[i], **flags, "special": special} for i, special in added.items()}


def _build_template(vocab: _Vocab, begin: list[str], end: list[str]) -> Any:
    from tokenizers.processors import TemplateProcessing

    single = [*begin, "$A", *end]
    second = ["$B:1", *(f"{token}:1" for token in end)] if vocab.kind == "bert" else [*begin, "$B", *end]
    return TemplateProcessing(
        single=single, pair=[*single, *second], special_tokens=[(t, vocab.index[t]) for t in dict.fromkeys(begin + end)]
    )
