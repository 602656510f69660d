"""The sound files that mutations begin from: every format that weft reads, of models of a few kilobytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ..e2e import integer_checkpoints
from ..e2e.test_integer_folders import CASES
from ..frontends.command import done

VOCAB = 300
_HEAD = "from weft import *\n"
ARCHITECTURES = {
    "llama": _HEAD
    + f"""
block = Block(Attention(heads=4, kv_heads=2, rope=RoPE()), GatedMLP(24), RMSNorm())
model = Decoder(vocab={VOCAB}, dim=16, layers=2, block=block, context=64)
""",
    "moe": _HEAD
    + f"""
block = Block(Attention(heads=4, kv_heads=2, rope=RoPE()), MoE(4, 24, 2), RMSNorm())
model = Decoder(vocab={VOCAB}, dim=16, layers=2, block=block, context=64)
""",
    "gpt2": _HEAD
    + f"""
block = Block(Attention(heads=4, qkv_bias=True, out_bias=True), MLP(24, "gelu_tanh", True), LayerNorm())
model = Decoder(vocab={VOCAB}, dim=16, layers=2, block=block, positions=LearnedPositions(64), tie_embeddings=True)
""",
    "mamba": _HEAD
    + f"""
model = Decoder(vocab={VOCAB}, dim=16, layers=2, block=Block(Mamba(32), None, RMSNorm()), tie_embeddings=True)
""",
    "bert": _HEAD
    + f"""
block = Block(Attention(heads=4, qkv_bias=True, out_bias=True), MLP(24, "gelu", True), LayerNorm(), "post")
model = Encoder(vocab={VOCAB}, dim=16, layers=2, block=block, positions=LearnedPositions(64), token_types=2)
""",
}
EXPORTED = ("llama", "moe", "gpt2")  # what a Hugging Face family expresses
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


def plant(folder: Path) -> Path:
    """Make the sound files in `folder`: NAME.py, and hf/NAME, gguf/NAME.gguf, onnx, torch, opt, and text."""
    for part in ("hf", "gguf", "onnx", "torch", "opt", "text", "quantized", "tokenizers"):
        (folder / part).mkdir(parents=True)
    for name, source in ARCHITECTURES.items():
        path = folder / f"{name}.py"
        path.write_text(source, encoding="utf-8")
        (folder / "text" / f"{name}.weft").write_text(done("opt", path).stdout, encoding="utf-8")
        done("compile", path, "-o", folder / "onnx" / name)
    for name in EXPORTED:
        done("export", folder / f"{name}.py", "-o", folder / "hf" / name)
        write_tokenizer(folder / "hf" / name)
        done("export", folder / "hf" / name, "--format", "gguf", "-o", folder / "gguf" / f"{name}.gguf")
    for name in ("llama", "gpt2"):
        shutil.rmtree(folder / "onnx" / name)
        done("compile", folder / "hf" / name, "-o", folder / "onnx" / name)
    done("opt", folder / "hf" / "llama", "-p", "pack-qkv", "-o", folder / "opt" / "llama")
    done("compile", folder / "hf" / "llama", "--target", "torch", "-o", folder / "torch" / "llama")
    done("compile", folder / "hf" / "llama", "--target", "transformers", "-o", folder / "transformers" / "llama")
    for name in QUANTIZED:
        how, pack, drawn = CASES[name]
        integer_checkpoints.model(folder / "made", how, pack, **drawn)[0].rename(folder / "quantized" / name)
    shutil.rmtree(folder / "made")
    write_tokenizers(folder / "tokenizers")
    _shard(folder / "hf" / "llama", folder / "hf" / "sharded")
    write_adapter(folder / "adapter")
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write the files of a byte-level tokenizer, as transformers saves one, into `folder`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from weft.frontends.formats.gguf.splits import SPLITS

    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS["qwen2"]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    text = ["the sky is blue and the sea is deep, so the ship sails on the sea under the sky"] * 8
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>"}), encoding="utf-8")


QUANTIZED = ("gptq-4", "gptq-3", "gptq-v2", "awq", "ct-4", "ct-8-symmetric", "torchao-4")
TOKENIZERS = ("bytes", "unigram", "words", "pieces", "merges")


def write_tokenizers(folder: Path) -> None:
    """Write a tokenizer of each of TOKENIZERS, in the form of tokenizer.json, into `folder`."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    words = [
        "<unk>",
        "<|end|>",
        "the",
        "sky",
        "is",
        "blue",
        "a",
        "s",
        "k",
        "y",
        "t",
        "h",
        "e",
        "##y",
        "##he",
        "▁the",
        "▁",
    ]
    ids = {word: i for i, word in enumerate(words)}
    byte = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    kinds: dict[str, Any] = {
        "bytes": models.BPE(vocab={**byte, "th": 256, "the": 257}, merges=[("t", "h"), ("th", "e")]),
        "unigram": models.Unigram([(word, -float(i)) for word, i in ids.items()], unk_id=0, byte_fallback=False),
        "words": models.WordLevel(ids, unk_token="<unk>"),
        "pieces": models.WordPiece(ids, unk_token="<unk>"),
        "merges": models.BPE(
            vocab={**ids, "th": 17}, merges=[("t", "h"), ("th", "e")], unk_token="<unk>", fuse_unk=True
        ),
    }
    for name, model in kinds.items():
        tokenizer: Any = Tokenizer(model)
        if name == "bytes":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
        elif name == "pieces":
            tokenizer.normalizer = normalizers.BertNormalizer()
            tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        else:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁"), normalizers.NFKC()])
            tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        tokenizer.add_special_tokens(["<|end|>"])
        tokenizer.post_processor = processors.TemplateProcessing("$A <|end|>", special_tokens=[("<|end|>", 1)])
        tokenizer.enable_truncation(64)
        (folder / f"{name}.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def write_adapter(folder: Path) -> None:
    """Write a LoRA adapter of the small llama, as PEFT saves one, into `folder`."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir()
    stem, tensors = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight", {}
    for layer in range(2):
        for name, out in (("q_proj", 16), ("v_proj", 8)):
            tensors[stem.format(layer, name, "A")] = np.full((2, 16), 0.1, np.float32)
            tensors[stem.format(layer, name, "B")] = np.full((out, 2), 0.1, np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    more = {"use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **more}, indent=1), encoding="utf-8")


def _shard(source: Path, folder: Path) -> None:
    """Write the Hugging Face folder `source` with its weights in two files and their index as `folder`."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, folder)
    (folder / "model.safetensors").unlink()
    tensors = load_file(source / "model.safetensors")
    names, home = sorted(tensors), dict[str, str]()
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{i:05}-of-00002.safetensors"
        save_file({key: tensors[key] for key in part}, folder / file)
        home |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": home}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def write_configs(folder: Path) -> None:
    """Write a whole config of every row of the table of families, as transformers spells it, into `folder`."""
    import transformers

    from ..e2e.families import ROWS
    from ..e2e.seq2seq import SEQ2SEQ

    folder.mkdir()
    rows: dict[str, Any] = {**ROWS, **SEQ2SEQ}
    for name, row in rows.items():
        made = getattr(transformers, row.model).config_class(**row.config)
        (folder / f"{name}.json").write_text(made.to_json_string(use_diff=False), encoding="utf-8")
