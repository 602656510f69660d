"""GGUF tokenizers of SentencePiece and WordPiece as Hugging Face files.

The oracles: transformers' own conversion of the same GGUF, onnxruntime-genai loading the files, and a direct
transcription of SentencePiece's merge rule.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from weft.frontends.formats.gguf import GGUFTensors, TokenIds, read_token_ids
from weft.ir.errors import WeftError

from ...tokenizer_files import BYTE, CONTROL, CORPUS, NORMAL, TEXTS, UNKNOWN, USER, Files, genai_ids, write_gguf

# --- SentencePiece BPE ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_spm() -> dict[str, Any]:
    """Metadata of a small SentencePiece vocabulary: bytes, then pieces with falling scores, as llama's is laid out."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = Regex(r"▁?\p{L}+|\p{N}|▁?[^▁\n\p{L}\p{N}]+|▁+|\n")
    trained.pre_tokenizer = pre_tokenizers.Split(words, "isolated")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=900, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    kept = [piece for piece in (a + b for a, b in model["merges"]) if all(ord(c) < 0x3000 or c == "▁" for c in piece)]
    letters = sorted({letter for piece in kept for letter in piece} | set(map(chr, range(33, 127))))
    pieces = list(dict.fromkeys([*kept, *letters]))  # a vocabulary without Chinese: those become bytes
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *map("<0x{:02X}>".format, range(256)), *pieces, "<|user|>"],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [USER],
    }


def sentencepiece(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's BPE as defined: while two neighbours make a piece, join the best-scored such pair, leftmost."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    index = {token: at for at, token in enumerate(tokens)}
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER)}
    symbols = list(text.replace(" ", "▁"))
    while pairs := [at for at in range(len(symbols) - 1) if symbols[at] + symbols[at + 1] in pieces]:
        best = max(pairs, key=lambda at: (scores[symbols[at] + symbols[at + 1]], -at))
        symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
    return [
        found
        for symbol in symbols
        for found in ([index[symbol]] if symbol in pieces else [index[f"<0x{byte:02X}>"] for byte in symbol.encode()])
    ]


SPM_TEXTS = [text for text in [*TEXTS, *CORPUS] if text and "<|user|>" not in text]


def test_sentencepiece_merges_equal_the_definition(small_spm: dict[str, Any], tmp_path: Path) -> None:
    prefixed = Files(small_spm, tmp_path / "prefix")
    bare = Files({**small_spm, "tokenizer.ggml.add_space_prefix": False}, tmp_path / "bare")
    for text in SPM_TEXTS:
        assert prefixed.ids(text) == sentencepiece(small_spm, " " + text), text
        assert bare.ids(text) == sentencepiece(small_spm, text), text
        assert prefixed.fast.decode(prefixed.ids(text)) == text == bare.fast.decode(bare.ids(text))
        assert prefixed.hf.encode(text) == [1, *prefixed.ids(text)]


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_sentencepiece_round_trip(text: str, spm_files: tuple[Files, Files]) -> None:
    for files in spm_files:
        assume("▁" not in text)  # what a space becomes; SentencePiece cannot tell the two apart
        assert files.fast.decode(files.ids(text)) == text


@pytest.fixture(scope="module")
def spm_files(small_spm: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, Files]:
    folder = tmp_path_factory.mktemp("spm")
    bare = {**small_spm, "tokenizer.ggml.add_space_prefix": False}
    return Files(small_spm, folder / "prefix"), Files(bare, folder / "bare")


def test_sentencepiece_agrees_with_transformers(small_spm: dict[str, Any], tmp_path: Path) -> None:
    metadata = {**small_spm, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    path = write_gguf(metadata | {"tokenizer.ggml.unknown_token_id": 0}, tmp_path / "a.gguf")
    files = Files(dict(GGUFTensors(path).metadata), tmp_path / "files")
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in SPM_TEXTS:
        if text[0] != " ":  # transformers adds no second space to a text that begins with one; SentencePiece does
            assert files.hf.encode(text) == oracle.encode(text), text


def test_sentencepiece_agrees_with_genai(spm_files: tuple[Files, Files]) -> None:
    prefixed, bare = spm_files
    genai = bare.genai()
    for text in SPM_TEXTS:
        if re.search(r"\S{100}", text):  # genai cuts words of more than 100 letters
            continue
        ids = bare.ids(text)
        assert genai_ids(genai, text) == ids, text
        assert genai.decode(ids) == text
    genai = prefixed.genai()
    for text in SPM_TEXTS:
        if not re.search(r"\S\s*  |\n ", text):  # genai cuts runs of spaces by a rule of its own
            ids = prefixed.ids(text)
            assert genai_ids(genai, text) == ids, text
            assert genai.decode([1, *ids]) == text


def test_sentencepiece_special_tokens(spm_files: tuple[Files, Files], small_spm: dict[str, Any]) -> None:
    files, _ = spm_files
    user = len(small_spm["tokenizer.ggml.tokens"]) - 1
    hello = files.ids("hello")
    assert files.ids("hello</s><|user|>hello") == [*hello, 2, user, *hello]  # the prefix comes back after each
    assert files.ids("hello", special=True) == [1, *hello]
    assert files.fast.decode([1, *hello, 2]) == "hello"
    assert (files.hf.bos_token_id, files.hf.eos_token_id, files.hf.unk_token_id) == (1, 2, 0)
    assert read_token_ids(small_spm) == TokenIds(bos=1, eos=[2], pad=None, add_bos=True, add_eos=False)


def test_sentencepiece_without_bytes_uses_the_unknown_token(small_spm: dict[str, Any], tmp_path: Path) -> None:
    keep = [at for at, kind in enumerate(small_spm["tokenizer.ggml.token_type"]) if kind != BYTE]
    metadata = dict(small_spm)
    for key in ("tokens", "scores", "token_type"):
        metadata[f"tokenizer.ggml.{key}"] = [small_spm[f"tokenizer.ggml.{key}"][at] for at in keep]
    files = Files(metadata, tmp_path)
    assert files.ids("日本 x")[1:3] == [0, files.ids("a x")[-1]]


def test_gemma4_files_have_merges(small_spm: dict[str, Any], tmp_path: Path) -> None:
    """The same pieces as SentencePiece's, whose merges the file ranks."""
    tokens, scores = small_spm["tokenizer.ggml.tokens"][259:-1], small_spm["tokenizer.ggml.scores"][259:-1]
    known, ranked = set(tokens), sorted(tokens, key=dict(zip(tokens, scores, strict=True)).__getitem__, reverse=True)
    cuts = ((piece[:cut], piece[cut:]) for piece in ranked for cut in range(len(piece) - 1, 0, -1))
    merges = [f"{left} {right}" for left, right in cuts if {left, right} <= known]
    plain = {**small_spm, "tokenizer.ggml.add_space_prefix": False}
    scored = Files(plain, tmp_path / "scored")
    files = Files({**plain, "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}, tmp_path / "ranked")
    genai = files.genai()
    for text in [*CORPUS, "a\n\nb  c"]:
        assert files.ids(text) == scored.ids(text), text
        if not re.search(r"\S{100}", text):  # genai cuts longer words
            assert files.ids(text) == genai_ids(genai, text), text


# --- WordPiece ------------------------------------------------------------------------------------------------------

WORDS = [
    "[PAD]",
    "[unused1]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "hello",
    "un",
    "##aff",
    "##able",
    "world",
    "##s",
    "!",
]
BERT: dict[str, Any] = {
    "general.architecture": "bert",
    "bert.context_length": 512,
    "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.tokens": [
        word if word[0] == "[" else word[2:] if word.startswith("##") else f"▁{word}" for word in WORDS
    ],
    "tokenizer.ggml.token_type": [CONTROL if word[0] == "[" else NORMAL for word in WORDS],
    "tokenizer.ggml.cls_token_id": 3,
    "tokenizer.ggml.seperator_token_id": 4,
    "tokenizer.ggml.unknown_token_id": 2,
    "tokenizer.ggml.mask_token_id": 5,
    "tokenizer.ggml.padding_token_id": 0,
}


def test_wordpiece_agrees_with_transformers(tmp_path: Path) -> None:
    files = Files(BERT, tmp_path)
    encoded = files.hf("Hello  UNAFFABLE worlds! 日", "héllo [MASK]")
    assert files.hf.convert_ids_to_tokens(encoded["input_ids"]) == (
        ["[CLS]", "hello", "un", "##aff", "##able", "world", "##s", "!", "[UNK]", "[SEP]", "hello", "[MASK]", "[SEP]"]
    )
    assert encoded["token_type_ids"] == [0] * 10 + [1] * 3
    pair = files.fast.encode("Hello  UNAFFABLE worlds! 日", "héllo [MASK]")
    assert (pair.ids, pair.type_ids) == (encoded["input_ids"], encoded["token_type_ids"])
    assert files.fast.decode(files.ids("unaffable worlds !")) == "unaffable worlds!"
    assert files.hf.model_max_length == 512
    assert read_token_ids(BERT) == TokenIds(bos=3, eos=[4], pad=0, add_bos=True, add_eos=True)


# --- SentencePiece Unigram ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unigram() -> dict[str, Any]:
    """Metadata of a small Unigram vocabulary, laid out as T5's."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False, shrinking_factor=0.75
    )
    trained.train_from_iterator(CORPUS, trainer)
    pieces = json.loads(trained.to_str())["model"]["vocab"]
    assert [piece for piece, _ in pieces[:3]] == special
    return {
        "general.architecture": "t5",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score in pieces],
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, UNKNOWN] + [NORMAL] * (len(pieces) - 3),
    }


def best_score(metadata: dict[str, Any], text: str) -> float:
    """Return the largest sum of scores of pieces that make up `text` (Viterbi 1967)."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    best = [0.0]
    for end in range(1, len(text) + 1):
        best.append(max(best[start] + scores[piece] for start in range(end) if (piece := text[start:end]) in scores))
    return best[-1]


def test_unigram_segmentation_equals_the_definition(unigram: dict[str, Any], tmp_path: Path) -> None:
    files = Files(unigram, tmp_path)
    tokens, scores = (unigram[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores"))
    known = {letter for token in tokens[3:] for letter in token} | {" "}
    for text in [" ".join(text.split()) for text in [*TEXTS, *CORPUS]]:
        if not text or "<|" in text or not set(text) <= known:
            continue
        ids, spelled = files.ids(f"  {text.replace(' ', '   ')} "), "▁" + text.replace(" ", "▁")
        assert "".join(tokens[i] for i in ids) == spelled
        assert sum(scores[i] for i in ids) == pytest.approx(best_score(unigram, spelled), abs=1e-3)
        assert files.fast.decode(ids) == text
        assert files.hf.encode(text) == [*ids, 1]
    assert files.ids("☃") == [tokens.index("▁"), 2]
    ids = read_token_ids(unigram)
    assert (ids.bos, ids.eos[0], ids.pad, ids.add_bos, ids.add_eos) == (None, 1, 0, False, True)


def test_unigram_without_a_prefix_and_with_all_spaces(unigram: dict[str, Any], tmp_path: Path) -> None:
    said = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.remove_extra_whitespaces": False}
    files, tokens = Files(unigram | said, tmp_path), unigram["tokenizer.ggml.tokens"]
    assert "".join(tokens[i] for i in files.ids("the  end ")) == "the▁▁end▁"


def test_invalid_character_map_is_refused(unigram: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="precompiled_charsmap is damaged"):
        Files(unigram | {"tokenizer.ggml.precompiled_charsmap": [255, 255, 255, 255, 1]}, tmp_path)
