"""weft eval: what models score, against the same numbers made from transformers' logits and hidden states."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from weft import compile as compile_model
from weft import evaluate
from weft.frontends.app.api.verify import divergence as scoring
from weft.frontends.app.cli import cli
from weft.ir.errors import WeftError

from ...llamas import TEXT, WORDS

TINY = """
from weft import MLP, Attention, Block, Decoder, Encoder, GatedMLP, RMSNorm, RoPE

block = Block(Attention(heads=4, kv_heads=2, rope=RoPE()), GatedMLP(48), RMSNorm())
model = Decoder(vocab=29, dim=32, layers=2, block=block, context=64)
other = Decoder(vocab=30, dim=32, layers=2, block=block, context=64)
encoder = Encoder(vocab=29, dim=32, layers=1, block=Block(Attention(heads=4, causal=False), MLP(64), RMSNorm()))
"""


def logits(folder: Path, rows: list[list[int]]) -> list[torch.Tensor]:
    """Float64 logits of transformers, each row by itself."""
    net = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        return [net(torch.tensor([row])).logits[0] for row in rows]


def weft_command(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["eval", *(str(a) for a in args)])


def test_scores_equal_those_of_transformers_logits(
    llamas: tuple[Path, Path], prose: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In windows of 20 tokens, cut into chunks of 7; the last window is shorter."""
    monkeypatch.setattr(scoring, "_MAX_LOGITS", 7 * len(WORDS))
    ids = Tokenizer.from_file(str(llamas[0] / "tokenizer.json")).encode(TEXT).ids
    starts = range(0, len(ids) - 1, 20)
    assert len(ids) > 41 and (len(ids) - 1) % 20
    rows = [ids[s : min(s + 20, len(ids) - 1)] for s in starts]
    one, two = (torch.cat(logits(folder, rows)) for folder in llamas)
    targets = torch.tensor(ids[1:])
    loss = torch.nn.functional.cross_entropy
    p, q = one.log_softmax(-1), two.log_softmax(-1)
    found = evaluate([llamas[1]], against=llamas[0], text=prose, context=20, device="cpu")
    first, second = found.scores
    assert (found.tokens, found.context, first.name) == (len(ids) - 1, 20, str(llamas[0]))
    assert first.nll == pytest.approx(loss(one, targets).item(), abs=1e-5)
    assert second.nll == pytest.approx(loss(two, targets).item(), abs=1e-5)
    assert second.perplexity == pytest.approx(math.exp(loss(two, targets).item()), rel=1e-4)
    assert second.kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), abs=1e-5)
    assert second.agreement == pytest.approx((one.argmax(-1) == two.argmax(-1)).double().mean().item())
    assert 0 < second.agreement < 0.5 < second.kl
    assert (first.kl, first.agreement) == (0, 1)
    divergences = (p.exp() * (p - q)).sum(-1)
    assert second.kl_99 == pytest.approx(torch.quantile(divergences, 0.99).item(), rel=1e-4)
    assert first.seconds > 0 and second.seconds > 0


def test_one_window_scores_the_loss_of_transformers(llamas: tuple[Path, Path], prose: Path) -> None:
    net = transformers.LlamaForCausalLM.from_pretrained(llamas[0])
    ids = torch.tensor([Tokenizer.from_file(str(llamas[0] / "tokenizer.json")).encode(TEXT).ids])
    with torch.no_grad():
        loss = net(ids, labels=ids).loss.item()
    assert evaluate(against=llamas[0], text=prose, device="cpu").scores[0].nll == pytest.approx(loss, abs=1e-5)


def test_folders_and_rewrites_are_scored_as_sources(llamas: tuple[Path, Path], prose: Path, tmp_path: Path) -> None:
    """A folder that gives the logits of the last token only is read token by token."""
    compile_model(llamas[0], tmp_path / "last", max_length=64)
    rewrites = {"packed": "pack-qkv, pack-gate-up", "cached": "default"}
    found = evaluate(
        [tmp_path / "last", llamas[0]], against=llamas[0], text=prose, rewrites=rewrites, context=32, device="cpu"
    )
    original = found.scores[0]
    for score in found.scores[1:]:
        assert score.nll == pytest.approx(original.nll, abs=1e-5)
        assert abs(score.kl) < 1e-9 and score.agreement == 1
        assert score.parameters == original.parameters == sum(p.numel() for p in _parameters(llamas[0]))
        assert score.cache_bytes == 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, numbers, bytes
    assert [s.name for s in found.scores[-2:]] == ["packed", "cached"]
    assert found.scores[2].kl == 0


def _parameters(folder: Path) -> list[torch.nn.Parameter]:
    return list(transformers.LlamaForCausalLM.from_pretrained(folder).parameters())


def test_tokens_are_counted_from_the_start(llamas: tuple[Path, Path], prose: Path) -> None:
    ids = Tokenizer.from_file(str(llamas[0] / "tokenizer.json")).encode(TEXT).ids[:11]
    (scores,) = logits(llamas[0], [ids[:-1]])
    found = evaluate(against=llamas[0], text=prose, tokens=10, device="cpu")
    assert found.tokens == 10
    assert found.scores[0].nll == pytest.approx(
        torch.nn.functional.cross_entropy(scores, torch.tensor(ids[1:])).item(), abs=1e-5
    )


def test_encoders_are_compared_by_cosine(minilm_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(minilm_folder, other)
    weights = load_file(other / "model.safetensors")
    name = "encoder.layer.1.attention.self.value.weight"
    weights[name] = -weights[name]
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    lines = ["The quick brown fox.", "A dog sleeps in the sun, all day long.", "Who knows?"]
    (tmp_path / "lines.txt").write_text("\n\n".join(lines) + "\n")
    found = evaluate([other, minilm_folder], against=minilm_folder, text=tmp_path / "lines.txt", device="cpu")
    one, two = (_embedded(folder, lines) for folder in (minilm_folder, other))
    want = torch.nn.functional.cosine_similarity(one, two).mean().item()
    _, changed, same = found.scores
    assert changed.cosine == pytest.approx(want, abs=1e-5) and want < 0.99
    assert same.cosine == pytest.approx(1, abs=1e-6)
    assert changed.nll is changed.kl is changed.agreement is None


def _embedded(folder: Path, lines: list[str]) -> torch.Tensor:
    """The mean of the last hidden states, each line by itself."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    net = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.stack([net(**tokenizer(x, return_tensors="pt")).last_hidden_state[0].mean(0) for x in lines])


# -- the command


@pytest.mark.long
def test_weights_in_fewer_bits_are_scored_beside_folders_of_them(
    llamas: tuple[Path, Path], prose: Path, tmp_path: Path
) -> None:
    """`--weights` scores what a folder compiled so scores; bits are codes, scales f16 and zero points, by hand."""
    compile_model(llamas[0], tmp_path / "q8", weights="int8{group=16}", max_length=64)
    short = ("int4{method=rtn, group=16}", "int8{group=16}")
    found = evaluate([tmp_path / "q8"], against=llamas[0], text=prose, weights=short, layers=True, device="cpu")
    original, folder, four, eight = found.scores
    assert [s.name for s in (four, eight)] == list(short)
    assert eight.nll == pytest.approx(folder.nll, abs=1e-6) and eight.kl == pytest.approx(folder.kl, abs=1e-6)
    assert four.nll_loss == pytest.approx(four.nll - original.nll) and original.nll_loss == 0
    assert 0 < eight.kl < four.kl and original.bits == 32
    # All rows have whole groups of 16; codes of 8 bits have no zero points, and two of 4 bits share a byte by row.
    assert eight.bits == folder.bits == 8 + 16 / 16
    points = {32: 1, 48: 2}  # bytes a row, of 2 and 3 groups
    shapes = [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]
    size = sum(rows * (width / 2 + 2 * width / 16 + points[width]) for rows, width in shapes)
    assert four.bits == pytest.approx(8 * size / sum(rows * width for rows, width in shapes))
    assert four.layer_bits == {f"layers.{i}": round(four.bits, 3) for i in range(3)}
    assert four.weight_bytes < eight.weight_bytes < original.weight_bytes
    assert four.layers.keys() == original.layers.keys() and min(four.layers.values()) > max(eight.layers.values()) > 0
    shown = weft_command("--against", llamas[0], "--text", prose, "--device", "cpu", "--weights", short[0]).stdout
    assert f"{four.bits:.2f}" in shown.splitlines()[-1].split() and "tokens/s" in shown
    with pytest.raises(WeftError, match="'int8' is given twice"):
        evaluate(against=llamas[0], text=prose, weights=["int8"], rewrites={"int8": "dce"}, device="cpu")
    with pytest.raises(WeftError, match="compiled already"):
        evaluate(against=tmp_path / "q8", text=prose, weights=["int8"], device="cpu")


def refused(*args: str | Path) -> str:
    result = weft_command(*args, "--device", "cpu")
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_inputs_that_cannot_be_scored_are_refused(llamas: tuple[Path, Path], prose: Path, tmp_path: Path) -> None:
    one, source = str(llamas[0]), tmp_path / "tiny.py"
    source.write_text(TINY)
    for name, content in (("empty.txt", b""), ("word.txt", b"a"), ("bytes.txt", b"\xff\xfe"), ("lines.txt", b"\n \n")):
        (tmp_path / name).write_bytes(content)
    compile_model(llamas[0], tmp_path / "out", max_length=32)
    against = ("--against", one, "--text")
    assert "no tokens" in refused(*against, tmp_path / "empty.txt")
    assert "one token" in refused(*against, tmp_path / "word.txt")
    assert "is not valid UTF-8" in refused(*against, tmp_path / "bytes.txt")
    assert "no such file" in refused(*against, tmp_path / "nowhere.txt")
    assert "--text" in refused("--against", one)
    assert "29 and 30 tokens" in refused(f"{source}:other", *against, prose)
    assert "an encoder" in refused(f"{source}:encoder", *against, prose)
    assert "no tokenizer" in refused("--against", f"{source}:model", "--text", prose)
    assert "context is 400, but" in refused(tmp_path / "out", *against, prose, "--context", "400")
    assert "compiled already" in refused("--against", tmp_path / "out", "--text", prose, "-p", "dce")
    assert "unknown pass 'nonesuch'" in refused(*against, prose, "-p", "nonesuch")
    assert "given to two pipelines" in refused(*against, prose, "-p", "a=dce", "-p", "a=cse")
    assert "nothing" in refused(tmp_path / "nothing", *against, prose)


def test_an_encoder_decoder_and_blank_lines_are_refused(
    llamas: tuple[Path, Path], prose: Path, root: Path, minilm_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "lines.txt").write_text("\n \n")
    with pytest.raises(WeftError, match="no text to embed"):
        evaluate(against=minilm_folder, text=tmp_path / "lines.txt", device="cpu")
    with pytest.raises(WeftError, match=r"tiny_translator\.py is an encoder-decoder"):
        evaluate([root / "examples/tiny_translator.py"], against=llamas[0], text=prose, device="cpu")
