"""Helpers for tests of GGUF tokenizers: texts, GGUF files, and the written files in every library that loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import onnxruntime_genai as og
from gguf import GGUFWriter, TokenType
from onnx import TensorProto, helper
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from weft.frontends.formats.gguf import write_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, BYTE = (
    int(TokenType[name]) for name in ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "BYTE")
)
TEXTS = [
    "",
    " ",
    "\n",
    "Hello, world!",
    "  two spaces first and last  ",
    " a  b   c\n\n d\t\te \nx",
    "1234567 12.5e-3 ½ ² ٣٤ x1y2",
    "don't we'll I'VE 'tis YOU'RE",
    "héllo wörld ñ ĳ ﬁ 中文字符 日本語テキスト 한국어 مرحبا Привет",
    "e\u0301 a\u0308 zero\u200bwidth\u200d no\u00a0break wide\u3000space",
    "😀👩\u200d👩\u200d👧\u200d👦🏳️\u200d🌈 🇩🇪 𝒜𝓁𝓁",
    "def f(x):\n    return x + 1\n\n\nclass A: pass\r\n",
    'http://a.b/c?d=e&f#g |||---=== (a) [b] {c} <d> "e" `f` $g ^h',
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|><|im_end|> b <|im_start",
    "A" * 200,
]
LICENSE = Path(__file__).parents[2] / "LICENSE"
CORPUS = LICENSE.read_text(encoding="utf-8").splitlines(keepends=True) + TEXTS


class Files:
    """One folder of written tokenizer files, loaded by everything that should load it."""

    def __init__(self, metadata: dict[str, Any], folder: Path) -> None:
        write_tokenizer(metadata, folder)
        self.folder = folder
        self.fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.hf = AutoTokenizer.from_pretrained(folder)

    def ids(self, text: str, special: bool = False) -> list[int]:
        return list(self.fast.encode(text, add_special_tokens=special).ids)

    def genai(self) -> og.Tokenizer:
        """onnxruntime-genai's tokenizer over these files, beside the smallest model it accepts."""
        return genai_tokenizer(self.folder)


def genai_tokenizer(folder: Path) -> og.Tokenizer:
    """onnxruntime-genai's tokenizer over the files in `folder`, with the smallest model that it accepts."""
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "seq"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "seq", 1])
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["floats", "last"], ["logits"]),
    ]
    last = helper.make_tensor("last", TensorProto.INT64, [1], [2])
    graph = helper.make_graph(nodes, "none", [ids], [logits], [last])
    opset = helper.make_opsetid("", 21)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), folder / "model.onnx")
    model = {"type": "decoder", "vocab_size": 9, "context_length": 9, "decoder": {"filename": "model.onnx"}}
    config = {"model": {**model, "eos_token_id": 0}, "search": {"max_length": 9}}
    (folder / "genai_config.json").write_text(json.dumps(config))
    return og.Tokenizer(og.Model(str(folder)))


def genai_ids(tokenizer: og.Tokenizer, text: str) -> list[int]:
    return [int(index) for index in tokenizer.encode(text)]


def write_gguf(metadata: dict[str, Any], path: Path) -> Path:
    writer = GGUFWriter(path, metadata["general.architecture"])
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_feed_forward_length(32)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key.endswith("_id"):
            writer.add_uint32(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
