"""Texts as token ids, and tokenizers for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import weft
from weft import Attention, Block, Decoder, Encoder, GatedMLP, RMSNorm, RoPE, TaskHead
from weft.frontends.app.api.training import corpus
from weft.frontends.app.api.training.corpus import (
    END,
    Corpus,
    attach_tokenizer,
    find_mask_token,
    find_special_tokens,
    read_sequence,
)
from weft.frontends.model import Model
from weft.ir.errors import WeftError

BOOK = Path(__file__).resolve().parents[5] / "examples" / "texts" / "kings.txt"
BLOCK = Block(Attention(4, rope=RoPE()), GatedMLP(32), RMSNorm())


def architecture(vocab: int = 300) -> Model:
    return weft.load_source(Decoder(vocab, 32, 1, BLOCK, context=64))


def with_bytes(*paths: Path) -> tuple[Model, list[Corpus]]:
    sources = [Corpus(path) for path in paths]
    return attach_tokenizer(architecture(), "bytes", sources), sources


def test_plain_text_is_read_whole_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "AT_ONCE", 1000)
    text = "one line — ça\r\nanother\n\n" * 200
    (tmp_path / "a.txt").write_bytes(text.encode())
    model, sources = with_bytes(tmp_path / "a.txt")
    assert len(list(sources[0].documents())) > 3
    ids = read_sequence(model, sources)
    tokenizer = corpus._train_tokenizer("bytes", [END], [])
    assert ids.dtype == np.uint16 and tokenizer.decode(ids.tolist()) == text


def test_documents_of_json_lines_end_with_the_end_of_text(tmp_path: Path) -> None:
    lines = [json.dumps({"body": word, "id": n}) for n, word in enumerate(["ab", "c"])]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines))
    sources = [Corpus(tmp_path / "a.jsonl", "body")]
    model = attach_tokenizer(architecture(), "bytes", sources)
    (end,) = model.graph.meta["eos_token_ids"]
    alphabet = corpus._train_tokenizer("bytes", [END], [])
    a, b, c = (alphabet.token_to_id(letter) for letter in "abc")
    assert read_sequence(model, sources).tolist() == [a, b, end, c, end]
    with pytest.raises(WeftError, match=r"a\.jsonl, line 1 has no text called 'text', but only body, id: name it with"):
        read_sequence(model, [Corpus(tmp_path / "a.jsonl")])


def test_files_of_ids_are_read_row_after_row(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[1, 2], [3, 4]]))
    (tmp_path / "b.json").write_text("[[5], [6, 7]]")
    paths = [Corpus(tmp_path / "a.npy"), Corpus(tmp_path / "b.json")]
    model = attach_tokenizer(architecture(), None, paths)
    assert model.tokenizer is None
    assert read_sequence(model, paths).tolist() == [1, 2, 3, 4, 5, 6, 7]
    (tmp_path / "b.json").write_text("[5, 300]")
    with pytest.raises(WeftError, match=r"b\.json has token 300, but the tokens of the model are 0 to 299"):
        read_sequence(model, paths)


def test_a_trained_tokenizer_gives_the_text_back_and_the_architecture_its_size(tmp_path: Path) -> None:
    model = attach_tokenizer(architecture(64), "bpe:400", [Corpus(BOOK)])
    assert model.graph.meta["vocab"] == 400
    assert model.tokenizer is not None
    model.tokenizer(tmp_path)
    text = "And king David said — ça ira\n"
    tokenizer = corpus._read_tokenizer(tmp_path)
    (ids,) = model.graph.tokenize([text])  # type: ignore[misc]
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode())
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == END
    again = attach_tokenizer(architecture(64), str(tmp_path), [])
    assert again.graph.meta["eos_token_ids"] == model.graph.meta["eos_token_ids"]
    assert again.graph.tokenize is not None and again.graph.tokenize([text]) == [ids]


@pytest.mark.parametrize(("vocab", "size"), [(600, 600), (300, 257)])
def test_an_architecture_gets_tokens_of_its_vocabulary_or_bytes(vocab: int, size: int, tmp_path: Path) -> None:
    model = attach_tokenizer(architecture(vocab), None, [Corpus(BOOK)])
    assert model.tokenizer is not None
    model.tokenizer(tmp_path)
    assert corpus._read_tokenizer(tmp_path).get_vocab_size() == size
    assert attach_tokenizer(model, None, [Corpus(BOOK)]) is model


def test_unreadable_texts_and_tokenizers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin.txt").write_bytes("ça".encode("latin-1"))
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "list.jsonl").write_text("[1]")
    model, _ = with_bytes()
    for name, message in {
        "none.txt": "the text .*none.txt cannot be read: no such file",
        "latin.txt": "cannot be read: .*can't decode byte",
        "broken.jsonl": "line 1: not valid JSON: Expecting",
        "list.jsonl": "line 1: a JSON object was expected, not array",
    }.items():
        with pytest.raises(WeftError, match=message):
            read_sequence(model, [Corpus(tmp_path / name)])
    with pytest.raises(WeftError, match=r"has no tokenizer for .*book\.txt: give token ids"):
        read_sequence(architecture(), [Corpus(tmp_path / "book.txt")])
    with pytest.raises(WeftError, match="bpe:N needs at least 257 tokens"):
        attach_tokenizer(architecture(), "bpe:no", [])
    with pytest.raises(WeftError, match="is not a tokenizer"):
        attach_tokenizer(architecture(), str(tmp_path / "broken.jsonl"), [])
    checkpoint = Model(architecture(64).graph, "c", "c")
    with pytest.raises(WeftError, match="c has 64 tokens, but the tokenizer has 257"):
        attach_tokenizer(checkpoint, "bytes", [])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(WeftError, match="needs the package datasets"):
        read_sequence(model, [Corpus(tmp_path)])


def test_special_tokens_are_those_around_a_text(minilm_folder: Path) -> None:
    minilm = weft.load_source(minilm_folder)
    assert find_special_tokens(minilm.graph) == ((101,), (102,)) and find_mask_token(minilm) == 103
    assert find_special_tokens(architecture().graph) == ((), ())
    with pytest.raises(WeftError, match="but has no tokenizer with a mask_token: name another"):
        find_mask_token(with_bytes(BOOK)[0])


def test_tokenizers_for_masked_tokens_have_a_mask() -> None:
    model = weft.load_source(Encoder(64, 32, 1, BLOCK, head=TaskHead("fill-mask")))
    trained = attach_tokenizer(model, "bytes", [Corpus(BOOK)])
    assert find_mask_token(trained) == 1 and trained.graph.params["embed.weight"].shape == (258, 32)
    with pytest.raises(WeftError, match=r"bpe:N needs at least 258 tokens, for all bytes and <\|endoftext\|> \[MASK\]"):
        attach_tokenizer(model, "bpe:257", [Corpus(BOOK)])
