"""GGUF tokenizers of byte-level BPE as Hugging Face files, and the metadata that no tokenizer can be made of.

The oracles: the vocabulary itself, transformers' own conversion of the same GGUF, and onnxruntime-genai loading the
files.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import onnxruntime_genai as og
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from weft.frontends.formats.gguf import GGUFTensors, TokenIds, read_token_ids, write_tokenizer
from weft.frontends.formats.gguf.splits import SPLITS
from weft.ir.errors import WeftError

from ....sampling import each
from ...tokenizer_files import CONTROL, CORPUS, NORMAL, TEXTS, USER, Files, genai_ids, write_gguf

# --- SmolLM2: a real byte-level BPE ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(dict(GGUFTensors(smollm2_gguf).metadata), tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def smollm2_genai(smollm2: Files) -> og.Tokenizer:
    return smollm2.genai()


@pytest.fixture(scope="module")
def smollm2_oracle(smollm2_gguf: Path) -> Tokenizer:
    """transformers' conversion of the GGUF, with the pre-tokenizer SmolLM2's own tokenizer.json declares."""
    backend = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name).backend_tokenizer
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return backend


def test_smollm2_ids(smollm2_gguf: Path) -> None:
    assert read_token_ids(GGUFTensors(smollm2_gguf).metadata) == TokenIds(
        bos=1, eos=[2], pad=2, add_bos=False, add_eos=False
    )


def test_smollm2_vocabulary_is_the_files(smollm2: Files, smollm2_gguf: Path) -> None:
    tokens = GGUFTensors(smollm2_gguf).metadata["tokenizer.ggml.tokens"]
    assert [smollm2.fast.id_to_token(index) for index in range(len(tokens))] == tokens
    assert smollm2.fast.get_vocab_size() == len(smollm2.hf) == len(tokens)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_agrees_everywhere(
    text: str, smollm2: Files, smollm2_genai: og.Tokenizer, smollm2_oracle: Tokenizer
) -> None:
    ids = smollm2.ids(text)
    assert ids == smollm2_oracle.encode(text).ids
    assert ids == smollm2.hf.encode(text)
    assert ids == genai_ids(smollm2_genai, text)
    shown = smollm2.fast.decode(ids, skip_special_tokens=False)
    assert shown == text == smollm2.hf.decode(ids)
    if ids:
        assert smollm2_genai.decode(ids) == smollm2.fast.decode(ids) == smollm2_oracle.decode(ids)


# Code points whose UTF-8 has bytes that the vocabulary does not spell; every tokenizer drops those.
UNSPELLED = "\x04\x06\x13\x14\x16\x1d"


@settings(max_examples=300)
@given(text=st.text(st.characters(exclude_characters=UNSPELLED, exclude_categories=["Cs"], max_codepoint=0x3FFFF)))
def test_smollm2_round_trip(text: str, smollm2: Files, smollm2_genai: og.Tokenizer, smollm2_oracle: Tokenizer) -> None:
    ids = smollm2.ids(text)
    assert smollm2.fast.decode(ids, skip_special_tokens=False) == text
    assert ids == smollm2_oracle.encode(text).ids


# Letters, digits, blanks and symbols that runs are made of, in the proportion that makes runs.
LETTERS = "aZé日 Я0٣²   \n\t'sretvmld.,!_-–😀<|>"
PROSE = st.text(st.sampled_from(LETTERS), max_size=40)


@settings(max_examples=300)
@given(text=PROSE)
def test_smollm2_prose_agrees_with_genai(
    text: str, smollm2: Files, smollm2_genai: og.Tokenizer, smollm2_oracle: Tokenizer
) -> None:
    ids = smollm2.ids(text)
    assert ids == genai_ids(smollm2_genai, text) == smollm2_oracle.encode(text).ids
    if ids:
        assert smollm2_genai.decode(ids) == text


def test_smollm2_chat(smollm2: Files, smollm2_genai: og.Tokenizer, smollm2_gguf: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    template = GGUFTensors(smollm2_gguf).metadata["tokenizer.chat_template"]
    assert (smollm2.folder / "chat_template.jinja").read_text(encoding="utf-8") == template
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected
    assert smollm2_genai.apply_chat_template(json.dumps(messages), add_generation_prompt=True) == expected


def test_smollm2_special_tokens(smollm2: Files) -> None:
    hf = smollm2.hf
    assert (hf.bos_token, hf.eos_token, hf.pad_token, hf.unk_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert hf.model_max_length == 8192
    assert hf.decode([1, 2, 0, 19556], skip_special_tokens=True) == "Hello"
    listed = json.loads((smollm2.folder / "special_tokens_map.json").read_text())
    assert listed["eos_token"] == "<|im_end|>"


# --- byte-level BPE under every pre-tokenizer -----------------------------------------------------------------------

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def small_bpe() -> dict[str, Any]:
    """Metadata of a small byte-level BPE whose merges reach across any of the pre-tokenizers' cuts."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # no cuts at all
    letters = random.Random(0)
    noise = ["".join(letters.choices(LETTERS, k=40)) for _ in range(2000)]
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator([*CORPUS, *noise], trainer)
    model = json.loads(trained.to_str())["model"]
    ranked = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = [*SPECIAL, *(token for token in ranked if token not in (*SPECIAL, "<think>"))]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, "<think>", "two  spaces"],
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3) + [USER] * 2,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in model["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    }


@pytest.mark.parametrize("pre", each(2, ["llama-bpe", "gpt-2", "qwen2", "qwen35", "tekken", "gpt-4o"]))
def test_pre_tokenizers_agree_with_transformers(pre: str, small_bpe: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf({**small_bpe, "tokenizer.ggml.pre": pre}, tmp_path / "a.gguf")
    metadata = dict(GGUFTensors(path).metadata)
    files = Files(metadata, tmp_path / "files")
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name).backend_tokenizer
    # Whole pieces stay whole in these tokenizers' own files; transformers' conversion leaves the flag out.
    oracle.model.ignore_merges = pre in ("llama-bpe", "tekken")
    for text in [*CORPUS, "x<think>y"]:
        assert files.ids(text) == oracle.encode(text, add_special_tokens=False).ids, text
        assert files.fast.decode(files.ids(text), skip_special_tokens=False) == text
    # transformers respells a user-defined token that has a space, and so never finds it in a text
    assert files.ids("x two  spaces z") == [*files.ids("x "), len(files.hf) - 1, *files.ids(" z")]


BEYOND_GENAI = ("afmoe", "deepseek-v3", "exaone-moe", "hunyuan-dense", "joyai-llm", "kimi-k2")  # as the module says


@pytest.mark.parametrize("pre", each(2, sorted(SPLITS)))
def test_every_pre_tokenizer_keeps_the_text_and_loads_in_genai(
    pre: str, small_bpe: dict[str, Any], tmp_path: Path
) -> None:
    files = Files({**small_bpe, "tokenizer.ggml.pre": pre}, tmp_path)
    genai = None if pre in BEYOND_GENAI else files.genai()
    for text in ["Hello, world! don't 1234", " a  b\n\nc", "日本語 Привет 😀", "<|im_start|>x<think>y<|im_end|>"]:
        ids = files.ids(text)
        assert files.fast.decode(ids, skip_special_tokens=False) == text
        assert ids == files.hf.encode(text, add_special_tokens=False)
        assert genai is None or genai_ids(genai, text) == ids


@pytest.fixture(scope="module")
def loaded(
    small_bpe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Files, og.Tokenizer]]:
    @cache
    def load(pre: str) -> tuple[Files, og.Tokenizer]:
        files = Files({**small_bpe, "tokenizer.ggml.pre": pre}, tmp_path_factory.mktemp(pre))
        return files, files.genai()

    return load


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
@settings(max_examples=200)
@given(text=PROSE)
def test_prose_agrees_with_genai(pre: str, text: str, loaded: Callable[[str], tuple[Files, og.Tokenizer]]) -> None:
    files, genai = loaded(pre)
    assert files.fast.decode(files.ids(text), skip_special_tokens=False) == text
    if pre in ("llama-bpe", "qwen2"):  # genai's own matcher: see the module's docstring
        assume(not re.search(r"\s\n\s*[^\S\n]", text))
    assert genai_ids(genai, text) == files.ids(text)


def test_digits_stand_alone_or_in_threes(small_bpe: dict[str, Any], tmp_path: Path) -> None:
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), "77", "777", "7777"]
    metadata = {**small_bpe, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [NORMAL] * len(tokens)}
    metadata["tokenizer.ggml.merges"] = ["7 7", "77 7", "777 7"]
    for pre, pieces in [("smollm", ["7"] * 5), ("llama-bpe", ["777", "77"]), ("gpt-2", ["77", "777"])]:
        files = Files({**metadata, "tokenizer.ggml.pre": pre}, tmp_path / pre)
        assert [files.fast.id_to_token(index) for index in files.ids("77777")] == pieces


# --- facts and faults -----------------------------------------------------------------------------------------------


def test_generation_ends_at_every_token_that_ends_a_turn(small_bpe: dict[str, Any]) -> None:
    assert read_token_ids(small_bpe) == TokenIds(bos=None, eos=[0, 2], pad=None, add_bos=False, add_eos=False)
    named = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 8, "tokenizer.ggml.bos_token_id": 1}
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert read_token_ids({**small_bpe, **named, **flags}) == TokenIds(1, [0, 7, 8, 2], None, True, True)


def test_bos_is_added_where_the_tokenizer_implies_it(small_bpe: dict[str, Any], tmp_path: Path) -> None:
    metadata = {**small_bpe, "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 1}
    files = Files({**metadata, "tokenizer.ggml.add_eos_token": True}, tmp_path)
    assert files.ids("a", special=True) == [1, *files.ids("a"), 0] == files.hf.encode("a")
    assert not read_token_ids({**metadata, "tokenizer.ggml.pre": "qwen2"}).add_bos
    del metadata["tokenizer.ggml.bos_token_id"]
    assert not read_token_ids(metadata).add_bos


def test_empty_tokens_get_names_and_templates_are_optional(small_bpe: dict[str, Any], tmp_path: Path) -> None:
    tokens, types = [*small_bpe["tokenizer.ggml.tokens"], "", ""], small_bpe["tokenizer.ggml.token_type"]
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [*types, NORMAL, NORMAL]}
    files = Files({**small_bpe, **changed}, tmp_path)
    assert files.fast.id_to_token(len(tokens) - 1) == f"[EMPTY_{len(tokens) - 1}]"
    assert not (tmp_path / "chat_template.jinja").exists()


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("kimi-k2", "中文English混合, 北京市 It's", "中文 English 混合 , _ 北京市 _It's"),
        ("kimi-k2", "12345 = (foo.bar)", "123 45 _= _( foo .bar )"),
        ("deepseek-v3", "カタカナ한국어 1234", "カタカナ 한국어 _ 123 4"),
        ("deepseek-v3", "x.y it's #tag", "x .y _it 's _# tag"),
        ("afmoe", "カタカナ한국어 12345678 12", "カタカナ한국어 _ 12 345 678 _ 12"),
        ("exaone-moe", "a word here, 12", "a_word_here , _ 1 2"),
        ("solar-open", "a word's, 12", "a _word 's , _ 1 2"),
    ],
)
def test_texts_are_cut_as_the_models_cut_them(pre: str, text: str, pieces: str) -> None:
    cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[pre]])
    assert [piece for piece, _ in cut.pre_tokenize_str(text)] == [p.replace("_", " ") for p in pieces.split()]


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer": ({"model": None}, r"tokenizer\.ggml\.model is missing in the GGUF metadata"),
    "unknown kind": ({"model": "rwkv"}, "model='rwkv' is unknown; known are gpt2, llama, t5, bert"),
    "unknown pre-tokenizer": ({"pre": "klingon"}, "pre='klingon' is unknown; known are .*smollm"),
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    "tokens not a list": ({"tokens": "abc"}, "tokenizer.ggml.tokens is 'abc', not of type list"),
    "tokens not text": ({"tokens": ["a", 5]}, r"tokenizer.ggml.tokens\[1\] is 5, not text"),
    "repeated token": ({"tokens": ["a", "b", "a"], "token_type": [1] * 3}, "tokens has 'a' twice"),
    "types cut": ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries instead of"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges is missing"),
    "merge of one": ({"merges": ["abc"]}, r"tokenizer.ggml.merges\[0\]='abc' must be two tokens that join"),
    "merge of strangers": ({"merges": ["a 漢"]}, r"tokenizer.ggml.merges\[0\]='a 漢'"),
    "id outside": ({"eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id is 1000000, outside the"),
    "id not a number": ({"bos_token_id": "<s>"}, "tokenizer.ggml.bos_token_id is '<s>', outside the"),
    "no scores": ({"model": "llama", "merges": None}, "tokenizer.ggml.scores is missing"),
    "scores cut": ({"model": "llama", "merges": None, "scores": [0.0]}, "scores has 1 entries instead of"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faulty_metadata_is_refused(case: str, small_bpe: dict[str, Any], tmp_path: Path) -> None:
    changes, message = FAULTS[case]
    metadata = {**small_bpe, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(WeftError, match=message):
        write_tokenizer(metadata, tmp_path / "out")
    assert not (tmp_path / "out").exists()
