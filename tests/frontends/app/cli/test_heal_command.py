"""`weft heal`: the folder that it writes, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import weft
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.formats.weft.model_folder import write_model
from weft.frontends.model import Model
from weft.ir import Graph, WeftError
from weft.passes import run_passes

from ....passes.library.quantize.checkpoints import in_memory
from ...command import done, refused

VOCAB, QUANTIZE = 53, "quantize{bits=3, group=16, head=4, method=rtn}"
BLOCK = weft.Block(weft.Attention(4, kv_heads=2, rope=weft.RoPE()), weft.GatedMLP(48), weft.RMSNorm())


def original(vocab: int = VOCAB) -> Graph:
    return in_memory(weft.Decoder(vocab, 32, 1, BLOCK, context=64).graph())


def folder(path: Path, vocab: int = VOCAB) -> Path:
    """A quantized model and its original, an architecture whose tokenizer knows letters."""
    tokenizer = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(26)} | {"?": 26}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    first = Model(
        original(vocab),
        "first",
        "first",
        tokenizer=lambda out: tokenizer.save(str(out / "tokenizer.json")),
    )
    write_model(first, path / "first")
    write_model(rewrite(first, QUANTIZE), path / "quantized")
    return path


def test_heal_writes_a_model_closer_to_the_original(tmp_path: Path) -> None:
    home = folder(tmp_path)
    (home / "notes.txt").write_text("it was a bright cold day in april " * 20)
    arguments = ("--against", home / "first", "--text", home / "notes.txt", "--context", "16", "--tokens", "3000")
    out = done("heal", home / "quantized", *arguments, "--rate", "0.01", "-o", home / "healed.weft").stdout
    before, after = (float(number) for number in out.splitlines()[-2].split(": ")[1].split(" -> "))
    assert after < 0.9 * before and str(home / "healed.weft") in out.splitlines()[-1]
    scores = weft.evaluate(
        [home / "quantized", home / "healed.weft"], against=home / "first", text=home / "notes.txt", device="cpu"
    ).scores
    assert scores[2].kl is not None and scores[1].kl is not None and scores[2].kl < 0.9 * scores[1].kl
    assert (home / "healed.weft" / "tokenizer.json").is_file()


def test_nothing_is_written_without_improvement(tmp_path: Path) -> None:
    home = folder(tmp_path)
    (home / "notes.txt").write_text("it was a bright cold day in april " * 20)
    arguments = ("--against", home / "first", "--text", home / "notes.txt", "--context", "16", "--tokens", "300")
    error = refused("heal", home / "quantized", *arguments, "--rate", "1000", "-o", home / "healed")
    assert "no closer" in error and not (home / "healed").exists()


def test_heal_refuses_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = folder(tmp_path)
    (home / "other").mkdir()
    folder(home / "other", VOCAB + 1)
    (home / "notes.txt").write_text("it was a bright cold day in april " * 20)
    (home / "short.txt").write_text("short")
    (home / "t5.py").write_text(
        "import weft\nblock = weft.Block(weft.Attention(2), weft.MLP(16), weft.RMSNorm())\n"
        "cross = weft.Block(weft.Attention(2), weft.MLP(16), weft.RMSNorm(), cross=weft.CrossAttention(2))\n"
        "both = weft.EncoderDecoder(weft.Encoder(53, 16, 1, block), weft.Decoder(53, 16, 1, cross))\n"
        "encoder = weft.Encoder(53, 16, 1, weft.Block(weft.Attention(2, causal=False), weft.MLP(16), weft.RMSNorm()))"
    )
    given = {"--against": home / "first", "--text": home / "notes.txt", "-o": home / "out"}

    def error(model: str | Path = home / "quantized", **more: str | Path) -> str:
        options = given | {(f"--{name}" if name != "o" else "-o"): value for name, value in more.items()}
        return refused("heal", model, *(part for pair in options.items() for part in pair))

    assert "has no scales to refit" in error(home / "first")
    assert f"has a vocabulary of {VOCAB} tokens, and" in error(against=home / "other" / "first")
    assert "short.txt has 5 tokens, but heal needs at least 512" in error(text=home / "short.txt")
    assert "cannot be read: no such file" in error(text=home / "none.txt")
    assert "encoder-decoder" in error(against=f"{home / 't5.py'}:both")
    assert "is an encoder" in error(against=f"{home / 't5.py'}:encoder")
    assert "rate is" in error(rate="-1") and "--rate" in error(rate="nan")
    assert "seconds is" in error(seconds="0")
    assert "device" in error(device="cuda")
    cached = run_passes(original(), f"{QUANTIZE}, kv-cache")
    with pytest.raises(WeftError, match="needs a graph without caches"):
        weft.heal(cached, against=original(), text=home / "notes.txt")
    with pytest.raises(WeftError, match="batch is 0"):
        weft.heal(home / "quantized", against=home / "first", batch=0)
    with pytest.raises(WeftError, match="no tokenizer"):
        weft.heal(run_passes(original(), QUANTIZE), against=original(), text=home / "notes.txt")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "PyTorch cannot be imported" in error()
    assert not (home / "out").exists()
