"""Tokenizers as GGUF metadata: a token for every row, ends of answers, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import weft
from weft.frontends import load_source
from weft.frontends.app.api.export import export
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.export.gguf.tokens import _read_tokens
from weft.frontends.formats.gguf import GGUFTensors
from weft.ir import WeftError

from ...conftest import Save

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


SPECIAL = ["<s>", "</s>", "<|eom_id|>", "<|eot_id|>", "<stop>"]


def save_folder(save: Any, rows: int, **generation: Any) -> Path:
    """A model of `rows` rows with a tokenizer of 261 tokens."""
    path = Path(save("llama", vocab_size=rows, num_key_value_heads=2)[1])
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *LETTERS])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_tokenizer_with_more_tokens_than_rows_is_refused(save: Any, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="the tokenizer has 261 tokens, but the embedding only 260 rows"):
        weft.export(save_folder(save, 260), tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_every_row_has_a_token(save: Any, tmp_path: Path) -> None:
    weft.export(save_folder(save, 264), tmp_path / "out.gguf")
    reader = GGUFTensors(tmp_path / "out.gguf")
    tokens, types = (reader.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    assert len(tokens) == len(types) == reader.shape("token_embd.weight")[0] == 264
    assert tokens[261:] == ["[PAD261]", "[PAD262]", "[PAD263]"] and types[261] == 5


def test_all_tokens_that_end_an_answer_are_kept(save: Any, tmp_path: Path) -> None:
    source = save_folder(save, 264, eos_token_id=[1, 2, 3])
    weft.export(source, tmp_path / "out.gguf")
    metadata = GGUFTensors(tmp_path / "out.gguf").metadata
    ids = [metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
    assert [SPECIAL[i] for i in ids] == ["</s>", "<|eot_id|>", "<|eom_id|>"]
    assert sorted(load_source(tmp_path / "out.gguf").graph.meta["eos_token_ids"]) == [1, 2, 3]
    notes = list[str]()
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2, 3, 4]}))
    weft.export(source, tmp_path / "out.gguf", note=notes.append)
    assert any("end tokens [2] are left out: a GGUF file names three tokens" in note for note in notes)


def test_eos_token_of_the_tokenizer_applies_if_no_config_has_an_id(save: Any) -> None:
    source = save_folder(save, 264)
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot_id|>"}))
    config = json.loads((source / "config.json").read_text())
    for key in ("bos_token_id", "eos_token_id"):
        config.pop(key, None)
    (source / "config.json").write_text(json.dumps(config))
    meta = load_source(source).graph.meta
    assert meta["eos_token_ids"] == [3] and meta.get("bos_token_id") is None
    (source / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))
    assert load_source(source).graph.meta["eos_token_ids"] == [1]


def test_tokenizer_of_smollm2_is_copied(smollm2_gguf: Path, tmp_path: Path) -> None:
    """From GGUF by way of a model folder, whose tokenizer.json is turned into metadata again."""
    from weft.frontends.formats.weft.model_folder import write_model

    model = rewrite(load_source(smollm2_gguf), f"prune-layers{{layers={[*range(1, 30)]}}}")
    write_model(model, tmp_path / "folder", dtype="bf16")
    export(tmp_path / "folder", tmp_path / "a.gguf", format="gguf", dtype="bf16")
    export(model, tmp_path / "b.gguf", format="gguf", dtype="bf16")
    files = smollm2_gguf, tmp_path / "b.gguf", tmp_path / "a.gguf"
    before, direct, made = (GGUFTensors(file).metadata for file in files)
    tokens = {key: value for key, value in before.items() if key.startswith("tokenizer.")}
    assert {key: value for key, value in direct.items() if key.startswith("tokenizer.")} == tokens
    assert {key: made.get(key) for key in tokens} == tokens
    for name in ("a", "b"):
        load_source(tmp_path / f"{name}.gguf").tokenizer(tmp_path / name)
    assert (tmp_path / "a/tokenizer.json").read_text() == (tmp_path / "b/tokenizer.json").read_text()


def test_sentencepiece_vocabulary_splits_texts_as_before(tmp_path: Path, save: Save) -> None:
    """Texts are cut as before, by scores instead of ranked merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from tokenizers.processors import TemplateProcessing

    _, save_folder = save("llama", vocab_size=280, num_key_value_heads=2)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcde", "ab", "abc", "▁a", "de", "▁abc"]
    merges = [("a", "b"), ("▁", "a"), ("ab", "c"), ("d", "e"), ("▁", "abc")]
    vocab = {word: i for i, word in enumerate(words)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = TemplateProcessing(single=["<s>", "$A"], pair=None, special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(save_folder / "tokenizer.json"))
    export(save_folder, tmp_path / "out.gguf", format="gguf")
    load_source(tmp_path / "out.gguf").tokenizer(tmp_path / "again")
    again = Tokenizer.from_file(str(tmp_path / "again/tokenizer.json"))
    for text in ("abc abc", "a de abab", "éa  x", ""):
        assert again.encode(text).ids == tokenizer.encode(text).ids, text
        assert again.decode(again.encode(text).ids) == tokenizer.decode(tokenizer.encode(text).ids)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", r"model/tokenizer\.json: not valid JSON: Expecting property name"),
        ("{}", "its tokenizer.json is not a readable tokenizer: Model missing"),
        (
            '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}',
            "its tokenizer is WordLevel, but weft writes only BPE",
        ),
        (
            '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "pre_tokenizer": {"type": "Whitespace"}}',
            "llama.cpp does not support the tokenizer's split of text",
        ),
    ],
)
def test_tokenizers_that_gguf_cannot_describe_are_refused(text: str, told: str, save: Save, tmp_path: Path) -> None:
    _, save_folder = save("llama", num_key_value_heads=2)
    (save_folder / "tokenizer.json").write_text(text)
    with pytest.raises(WeftError, match=told):
        export(save_folder, tmp_path / "out.gguf", format="gguf")


def test_outlying_token_id_is_refused_instead_of_filled_up() -> None:
    class Source:
        spec = "folder"
        graph = type("Graph", (), {"meta": {"vocab": 2}})

    source: Any = Source
    with pytest.raises(WeftError, match=r"the vocabulary has 2147483648 entries, above the limit 16777216"):
        _read_tokens({"model": {"type": "BPE", "vocab": {"a": 0, "b": 2**31 - 1}}}, source, 2)
