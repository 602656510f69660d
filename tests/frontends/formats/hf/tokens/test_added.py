"""Tokens and chat templates that several files of a folder name are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import weft
from weft.backends.runtime.text.chat import ChatTemplate
from weft.frontends.formats.hf.tokens.files import copy_tokenizer
from weft.ir import WeftError

from ....tokenizer_files import genai_ids, genai_tokenizer

TEXTS = [
    "hello <tool> world",
    " <a>  <b> x<c>y <d>z",
    "the</s> quick <s>hello<pad>",
    "</x> Quickly quick",
    "fox<f> <g>h",
]


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": True, **flags}  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "listed": {"config": {"added_tokens_decoder": {"300": token("<tool>"), "301": token("<a>", special=False)}}},
    "listed by ids that are taken": {"config": {"added_tokens_decoder": {"7": token("<b>"), "500": token("<a>")}}},
    "flags": {
        "config": {
            "added_tokens_decoder": {
                "300": token("<a>", lstrip=True),
                "301": token("<b>", rstrip=True, normalized=True),
                "302": token("quick", single_word=True, special=False),
                "1": token("<s>", lstrip=True),
            }
        }
    },
    "additional": {"config": {"additional_special_tokens": ["<tool>", "<d>"]}},
    "additional beside a map": {
        "config": {"additional_special_tokens": ["<tool>", "<d>"]},
        "map": {"additional_special_tokens": ["<f>"], "mask_token": token("<g>", rstrip=True)},
    },
    "extra": {"config": {"extra_special_tokens": ["<b>", "<c>"]}},
    "extra by name": {"config": {"extra_special_tokens": {"image_token": "<f>", "tool_token": "<tool>"}}},
    "named": {"config": {"eos_token": "<d>", "unk_token": "<a>", "think_token": "<c>", "bos_token": None}},
    "older files": {"map": {"eos_token": "<tool>", "pad_token": token("<f>", rstrip=True)}, "added": ["<g>", "<f>"]},
    "older files that do not count": {
        "config": {"added_tokens_decoder": {}},
        "map": {"eos_token": "<tool>"},
        "added": ["<g>"],
    },
    "begin and end": {"config": {"add_bos_token": True, "add_eos_token": True}},
    "cut": {"stored": {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}}},
    "padded": {
        "config": {"pad_token": ...},
        "stored": {"padding": {"strategy": {"Fixed": 20}, "direction": "Left", "pad_to_multiple_of": None,
                               "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of 300 tokens: <pad>, <s>, </s> and pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog hello world "], trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    folder = tmp_path_factory.mktemp("plain")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


def edited(plain: Path, folder: Path, case: dict[str, Any]) -> Path:
    folder.mkdir()
    stored, config = (json.loads((plain / f"{name}.json").read_text()) for name in ("tokenizer", "tokenizer_config"))
    config.pop("added_tokens_decoder", None)
    config = {key: value for key, value in {**config, **case.get("config", {})}.items() if value is not ...}
    files = {"tokenizer": {**stored, **case.get("stored", {})}, "tokenizer_config": config}
    if "map" in case:
        files["special_tokens_map"] = {
            key: {k: v for k, v in value.items() if k != "special"} if isinstance(value, dict) else value
            for key, value in case["map"].items()
        }
    if "added" in case:
        files["added_tokens"] = {text: 300 + i for i, text in enumerate(case["added"])}
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_get_the_ids_that_transformers_gives_them(name: str, plain: Path, tmp_path: Path) -> None:
    source, out = edited(plain, tmp_path / "source", CONFIGS[name]), tmp_path / "out"
    out.mkdir()
    theirs = AutoTokenizer.from_pretrained(source)
    copy_tokenizer(source, out)
    ours, again = Tokenizer.from_file(str(out / "tokenizer.json")), AutoTokenizer.from_pretrained(out)
    assert again.special_tokens_map == theirs.special_tokens_map
    genai = genai_tokenizer(out)
    for text in TEXTS:
        wanted = theirs(text)["input_ids"]
        assert ours.encode(text).ids == again(text)["input_ids"] == wanted
        assert ours.decode(wanted) == theirs.decode(wanted, skip_special_tokens=True)
        if name not in ("flags", "listed by ids that are taken"):  # genai strips no spaces around tokens
            assert genai_ids(genai, text) == wanted


def test_tokenizer_files_without_additions_are_copied_unchanged(plain: Path, tmp_path: Path) -> None:
    copy_tokenizer(plain, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (plain / name).read_bytes()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"config": {"split_special_tokens": True}}, "split_special_tokens=True is not supported: remove it"),
        ({"config": {"added_tokens_decoder": {"300": {"content": 3}}}}, r"added_tokens_decoder\.300\.content"),
        ({"config": {"additional_special_tokens": ["<a>"]}, "stored": {"model": {}}}, "not a readable tokenizer"),
    ],
)
def test_invalid_tokens_are_refused(case: dict[str, Any], words: str, plain: Path, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=words):
        copy_tokenizer(edited(plain, tmp_path / "source", case), tmp_path)


# -- chat templates

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{{ bos_token }}{{ sep_token }}:{{ m.content }}{{ m.reasoning_content }}]"
    "{% endfor %}"
    "{{ tools | tojson(ensure_ascii=True) if tools else '' }}"
)
MESSAGES = [
    {"role": "user", "content": "hello", "name": None},
    {"role": "assistant", "content": None, "thinking": "hm"},
    {"role": "tool"},
]
NAMED = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "TOOLS" + TEMPLATE}]
PLACES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "config": ({"chat_template": TEMPLATE}, {}),
    "null tokens": ({"chat_template": TEMPLATE, "sep_token": None}, {}),
    "list": ({"chat_template": NAMED}, {}),
    "file before config": ({"chat_template": NAMED}, {"chat_template.jinja": "FILE" + TEMPLATE}),
    "folder": (
        {"chat_template": "CONFIG"},
        {"chat_template.jinja": TEMPLATE, "additional_chat_templates/tool_use.jinja": "FOLDER" + TEMPLATE},
    ),
    "file before processor": ({}, {"chat_template.jinja": TEMPLATE, "chat_template.json": '{"chat_template": "old"}'}),
}


@pytest.mark.parametrize("place", PLACES)
def test_chats_render_as_in_transformers(place: str, plain: Path, tmp_path: Path) -> None:
    config, files = PLACES[place]
    source, out = edited(plain, tmp_path / "source", {"config": config}), tmp_path / "out"
    for name, text in files.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    out.mkdir()
    copy_tokenizer(source, out)
    theirs, again = (AutoTokenizer.from_pretrained(folder) for folder in (source, out))
    for tools in (None, [], [{"type": "function", "function": {"name": "ä"}}]):
        wanted = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
        assert "None" not in wanted
        assert ChatTemplate(out).render(MESSAGES, tools=tools, answer=False) == wanted
        assert again.apply_chat_template(MESSAGES, tools=tools, tokenize=False) == wanted
    chat = json.dumps([{"role": "user", "content": "hello"}])
    assert "hello" in genai_tokenizer(out).apply_chat_template(chat, add_generation_prompt=False)


def test_chat_template_of_a_processor_is_the_fallback(plain: Path, tmp_path: Path) -> None:
    source = edited(plain, tmp_path / "source", {})
    (source / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    copy_tokenizer(source, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == TEMPLATE


def test_templates_without_a_default_are_refused(plain: Path, tmp_path: Path) -> None:
    source = edited(plain, tmp_path / "source", {"config": {"chat_template": [{"name": "rag", "template": "x"}]}})
    with pytest.raises(WeftError, match="its chat templates are rag, but one must be called default"):
        ChatTemplate(source)
    named = [{"name": "../../out", "template": "x"}]
    source = edited(plain, tmp_path / "other", {"config": {"chat_template": named}})
    with pytest.raises(WeftError, match=r"'\.\./\.\./out' is not a valid name of a chat template"):
        copy_tokenizer(source, tmp_path)


def test_tokenizer_without_a_config_loads_in_transformers(save: Any, plain: Path, tmp_path: Path) -> None:
    folder = Path(save("llama", vocab_size=300)[1])
    (folder / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    wanted = Tokenizer.from_file(str(plain / "tokenizer.json")).encode("hello </s>").ids
    weft.compile(folder, tmp_path / "compiled", target="transformers")
    weft.export(folder, tmp_path / "exported")
    for out in (tmp_path / "compiled", tmp_path / "exported"):
        assert AutoTokenizer.from_pretrained(out)("hello </s>")["input_ids"] == wanted


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.txt", "vocab.json", "spiece.model"])
def test_older_tokenizers_are_refused_with_a_remedy(name: str, save: Any, tmp_path: Path) -> None:
    folder = Path(save("llama")[1])
    (folder / name).write_bytes(b"[PAD]\n[UNK]\n")
    with pytest.raises(
        WeftError, match=rf"has {name} but no tokenizer\.json, .*: create it with transformers, AutoTok"
    ):
        weft.compile(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bert_lower_cases_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "A"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(tmp_path / "source" / "tokenizer.json"))
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (tmp_path / "source" / "tokenizer_config.json").write_text(json.dumps(config))
    copy_tokenizer(tmp_path / "source", tmp_path)
    wanted = AutoTokenizer.from_pretrained(tmp_path / "source")("a A", add_special_tokens=False)["input_ids"]
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a A").ids == wanted == [5, 6]


def test_token_ids_above_the_limit_are_refused(plain: Path, tmp_path: Path) -> None:
    """The library takes gigabytes to write them."""
    stored = json.loads((plain / "tokenizer.json").read_text())
    stored["model"]["vocab"]["h"] = 1 << 31
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    (tmp_path / "out").mkdir()
    with pytest.raises(WeftError, match=r"tokenizer\.json: the id of token 'h' must be below 16,777,216"):
        copy_tokenizer(tmp_path, tmp_path / "out")
