"""weft run: answers, refusals, and what a terminal shows."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import weft
from weft.backends.runtime import device as place
from weft.frontends.app.cli.run_command import print_task
from weft.ir.errors import WeftError

from ...command import TINY, done, refused, start

WORDS = ["<s>", "</s>", "user", "assistant", "hello", "there", "what", "is", "the", "sky", "blue", "."]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled folder with a tokenizer of twelve words and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    home = tmp_path_factory.mktemp("compiled")
    (home / "tiny.py").write_text(TINY)
    done("compile", home / "tiny.py", "-o", home / "out")
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(home / "out" / "tokenizer.json"))
    (home / "out" / "chat_template.jinja").write_text(TEMPLATE)
    return home / "out"


def test_run_streams_the_answer_and_times_it(compiled: Path) -> None:
    result = done("run", compiled, "--prompt", "what is the sky", "--max-tokens", "5")
    expected = weft.load(compiled).generate("what is the sky", max_tokens=5)
    assert result.stdout == f"{expected[0].text}\n"
    assert "4 prompt tokens" in result.stderr and "then 5 tokens at" in result.stderr


def test_run_writes_values_inside_the_model(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "seen.npz"
    printed = done("run", tiny, "--ids", "3,1,4", "--expose", "attention, residual", "--layers", "0", "-o", out)
    with np.load(out) as file:
        assert file["ids"].tolist() == [3, 1, 4]
        shapes = {name: file[name].shape for name in file.files if name not in ("ids", "tokens")}
    assert list(shapes) == ["logits", "attention.layers.0.attn", "residual.layers", "residual.layers.0"]
    assert printed.stdout.splitlines()[1] == f"attention.layers.0.attn\t{list(shapes['attention.layers.0.attn'])}"
    assert "3 tokens" in printed.stderr
    assert "have no routes: leave it out" in refused("run", tiny, "--ids", "3", "--expose", "routes")
    assert "--layers needs --expose" in refused("run", tiny, "--ids", "3", "--layers", "0")
    assert "has no tokenizer to read a text with" in refused("run", tiny, "--prompt", "what", "--expose", "all")


def test_run_reads_a_piped_prompt(compiled: Path) -> None:
    piped = done("run", compiled, "--max-tokens", "5", input="what is the sky\n")
    assert piped.stdout == done("run", compiled, "--max-tokens", "5", "--prompt", "what is the sky").stdout


def test_run_repeats_samples_with_a_seed(compiled: Path) -> None:
    args = ("run", compiled, "--prompt", "the sky", "--top-p", "0.9", "--seed", "1")
    assert done(*args).stdout == done(*args).stdout != done(*args[:-2]).stdout


def test_run_stops_at_a_stop_string(compiled: Path) -> None:
    text = done("run", compiled, "--prompt", "the sky", "--max-tokens", "8").stdout.strip()
    word = text.split()[2]
    cut = done("run", compiled, "--prompt", "the sky", "--max-tokens", "8", "--stop", word).stdout.strip()
    assert cut == text.partition(word)[0].strip()


def test_run_chats_by_the_template(compiled: Path) -> None:
    plain = done("run", compiled, "--prompt", "user hello assistant", "--max-tokens", "6")
    assert done("run", compiled, "--chat", "--prompt", "hello", "--max-tokens", "6").stdout == plain.stdout
    told = done("run", compiled, "--chat", "--system", "the sky", "--prompt", "hello", "--max-tokens", "6")
    assert "6 prompt tokens" in told.stderr


def test_run_drafts_by_prompt_lookup_and_by_an_assistant(compiled: Path, tmp_path: Path) -> None:
    """By look-up, and by the model itself as its own assistant: the same answer, and what was right."""
    (tmp_path / "tiny.py").write_text(TINY)
    done("compile", tmp_path / "tiny.py", "-o", tmp_path / "out", "--passes", "default,-last-token-logits")
    args = ("run", tmp_path / "out", "--ids", "4,5,6,4,5,6,4,5", "--max-tokens", "12")
    plain = done(*args, "--prompt-lookup", "0")
    assert "drafted" not in plain.stderr
    looked, assisted = done(*args, "--prompt-lookup", "4"), done(*args, "--assistant", tmp_path / "out")
    assert looked.stdout == assisted.stdout == done(*args).stdout == plain.stdout
    assert "drafted tokens right" in assisted.stderr
    both = refused("run", tmp_path / "out", "--ids", "4", "--prompt-lookup", "4", "--assistant", tmp_path / "out")
    assert "but there is an assistant too, and only one can draft tokens: leave out either" in both
    done("compile", tmp_path / "tiny.py", "-o", tmp_path / "last", "--target", "onnx")
    assert "it cannot verify drafted tokens: compile it with" in refused(
        "run", tmp_path / "last", "--ids", "4", "--prompt-lookup", "4"
    )


def test_run_keeps_some_experts_on_the_device(compiled: Path, tmp_path: Path) -> None:
    """Of a source, which is compiled for PyTorch then, and of a folder."""
    (tmp_path / "tiny.py").write_text(re.sub(r"GatedMLP\((\d+)\)", r"MoE(8, \1, 2)", TINY).replace("GatedMLP", "MoE"))
    few = done("run", tmp_path / "tiny.py", "--ids", "4,5", "--max-tokens", "6", "--experts-on-device", "2")
    whole = done("run", tmp_path / "tiny.py", "--ids", "4,5", "--max-tokens", "6", "--target", "torch")
    assert few.stdout == whole.stdout
    assert " of experts found on the device, " in few.stderr and "MB moved per token" in few.stderr
    assert "experts" not in whole.stderr.splitlines()[-1]
    assert "compiled for ort-cpu, which keeps all experts on the device" in refused(
        "run", compiled, "--ids", "4", "--experts-on-device", "2"
    )
    assert "--experts-on-device needs --target torch, not ort-cpu" in refused(
        "run", tmp_path / "tiny.py", "--ids", "4", "--experts-on-device", "2", "--target", "ort-cpu"
    )


def test_run_searches_with_beams(compiled: Path) -> None:
    model = weft.load(compiled)
    (best,) = model.generate("the sky", max_tokens=6, beams=3)
    args = ("run", compiled, "--max-tokens", "6", "--beams", "3")
    found = done(*args, "--prompt", "the sky")
    assert found.stdout == f"{best.text}\n" and "2 prompt tokens" in found.stderr
    ids = ",".join(map(str, best.prompt))
    assert done(*args, "--ids", ids).stdout == ",".join(map(str, best.tokens)) + "\n"
    assert done(*args, "--chat", "--prompt", "hello").stdout
    assert "stop strings" in refused(*args, "--prompt", "sky", "--stop", "x")


@pytest.mark.long
def test_run_compiles_a_source_first(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = done("run", smollm2_gguf, "--device", "cpu", "--chat", "--prompt", "What is the capital of France?")
    assert "Paris" in result.stdout
    assert f"compiling {smollm2_gguf} with ONNX Runtime on the CPU for this run" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--prompt", "sky " * 70), ("70 tokens", "maximum of 64")),
        (("--prompt", ""), ("no tokens",)),
        (("--prompt", "sky", "--temperature", "-1"), ("temperature",)),
        (("--prompt", "sky", "--top-p", "1.5"), ("top_p",)),
        (("--prompt", "sky", "--max-tokens", "0"), ("--max-tokens",)),
        (("--prompt", "sky", "--stop", ""), ("stop",)),
        (("--prompt", "sky", "--device", "tpu"), ("tpu", "cuda")),
        (("--prompt", "sky", "--device", "cuda"), ("ort-cpu", "--target ort-cuda")),
        (("--prompt", "sky", "--system", "blue"), ("--system", "--chat")),
        (("--threads", "0", "--prompt", "sky"), ("--threads",)),
        (("--prompt", "sky", "--beams", "0"), ("--beams",)),
        (("--prompt", "sky", "--beams", "2", "--seed", "1"), ("beam search", "sampling")),
        (("--prompt", "sky", "--normalize"), ("is a decoder", "--normalize")),
        (("--prompt", "sky", "--truncate-dim", "3"), ("is a decoder", "--truncate-dim")),
        (("--prompt", "sky", "--seed", "1"), ("seed is 1, but nothing is sampled at temperature 0",)),
        (("--prompt", "sky", "--temperature", "0", "--top-k", "2"), ("top_k is 2, but nothing is sampled",)),
        (("--prompt", "sky", "--trust"), ("--trust runs the Python of folders compiled for PyTorch",)),
        (("--prompt", "sky", "--target", "torch"), ("is already compiled", "--target")),
    ],
)
def test_run_refuses_bad_options(compiled: Path, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    line = refused("run", compiled, *args)
    assert all(word in line for word in words)


@pytest.mark.parametrize("options", [("--target", "torch"), ()])
def test_source_runs_in_pytorch_on_request_or_without_onnx_runtime(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By request, or because ONNX Runtime is not installed."""
    (tmp_path / "tiny.py").write_text(TINY)
    asked = ("run", tmp_path / "tiny.py", "--ids", "3,1,4", "--max-tokens", "5", "--device", "cpu")
    by_onnxruntime = done(*asked)
    assert "with ONNX Runtime on the CPU for this run; keep the result with `weft compile " in by_onnxruntime.stderr
    if not options:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    by_torch = done(*asked, *options)
    assert "with PyTorch on the CPU for this run; keep the result with `weft compile " in by_torch.stderr
    assert " --target torch -o DIR`" in by_torch.stderr
    assert by_torch.stdout == by_onnxruntime.stdout


def test_a_source_without_a_tokenizer_is_not_compiled_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "never"))
    assert "no tokenizer" in refused("run", "llama3.1-405b", "--prompt", "x", "--device", "cpu")


def test_missing_device_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "find_cuda_problem", lambda ort: "the NVIDIA driver sees no GPU")
    assert refused("run", tiny, "--prompt", "x", "--device", "cuda").endswith("sees no GPU")


def test_an_encoder_embeds_and_does_not_chat(minilm_folder: Path, tmp_path: Path) -> None:
    done("compile", minilm_folder, "-o", tmp_path / "out")
    mean, first, unit = (
        np.array(json.loads(done("run", tmp_path / "out", "--prompt", "hello", *options).stdout))
        for options in (("--no-normalize",), ("--pooling", "cls", "--no-normalize"), ())
    )
    assert mean.shape == first.shape == (384,) and np.abs(mean - first).max() > 0.01
    np.testing.assert_allclose(unit, mean / np.linalg.norm(mean), atol=1e-6)
    cut = done("run", tmp_path / "out", "--prompt", "hello", "--truncate-dim", "5")
    np.testing.assert_allclose(json.loads(cut.stdout), unit[:5], atol=1e-6)
    assert "leave out --prompt-name" in refused("run", tmp_path / "out", "--prompt", "hello", "--prompt-name", "query")
    assert "query, document" in refused("run", tmp_path / "out", "--prompt", "hello", "--prompt-name", "no")
    for option in (["--chat"], ["--beams", "2"]):
        assert "encoder" in refused("run", tmp_path / "out", "--prompt", "hello", *option)


def test_run_refuses_a_missing_source(tmp_path: Path) -> None:
    assert "nothing" in refused("run", tmp_path / "nothing", "--prompt", "x")


def test_model_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "from weft import Attention, Block, Decoder\nmodel = Decoder(11, 8, 2, Block(Attention(2)), context=16)\n"
    )
    answer = done("run", tmp_path / "model.py", "--ids", "3,1,4", "--max-tokens", "2")
    assert len(answer.stdout.strip().split(",")) == 2
    assert "then 2 tokens" in answer.stderr
    assert "--ids" in refused("run", tmp_path / "model.py", "--prompt", "hello")
    assert "1,15,7" in refused("run", tmp_path / "model.py", "--ids", "3,x")
    assert "--prompt" in refused("run", tmp_path / "model.py", "--ids", "3", "--prompt", "x")


# -- terminals


def on_a_terminal(*args: str | Path, cwd: Path, typed: Sequence[str] = ()) -> tuple[int, str]:
    """Exit status and screen of a command on a pseudo terminal; each of `typed` answers one prompt."""
    ours, theirs = os.openpty()
    process = start(*args, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen, answered = b"", 0
    while select.select([ours], [], [], 60)[0]:
        try:
            some = os.read(ours, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            break
        screen += some
        if some and answered < len(typed) and screen.count(b"\n> ") > answered:
            os.write(ours, typed[answered].encode(errors="surrogateescape"))
            answered += 1
        if not some:
            break
    else:
        process.kill()
    os.close(ours)
    return process.wait(60), screen.decode(errors="replace")


def test_terminal_conversation_continues_after_errors(compiled: Path, tmp_path: Path) -> None:
    typed = ["hello\n", "\n", "sky " * 70 + "\n", "wh\udcff\n", "what is blue\n", "\x04"]
    status, screen = on_a_terminal("run", compiled, "--chat", "--max-tokens", "3", cwd=tmp_path, typed=typed)
    assert status == 0
    assert screen.count("prompt tokens in") == 2
    assert screen.count("weft: error: a prompt of") == 1
    assert screen.count("weft: error: the message is not valid UTF-8: byte 0xff stands at character 3") == 1
    assert "Traceback" not in screen


@pytest.mark.parametrize(
    ("locale", "args", "piped"),
    [
        ("C.UTF-8", (), b"a \xff"),
        ("C", ("--chat",), b"a \xff"),  # Python decodes otherwise there
        ("C.UTF-8", ("--prompt", b"a \xff"), None),
    ],
)
def test_invalid_utf_8_prompt_is_one_error_line(
    compiled: Path, tmp_path: Path, locale: str, args: tuple[str | bytes, ...], piped: bytes | None
) -> None:
    command = [sys.executable, "-m", "weft", "run", str(compiled), *args]
    env = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0"}
    ended = subprocess.run(command, input=piped, env=env, cwd=tmp_path, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, b"")
    told = ended.stderr.decode()
    assert told.startswith("weft: error: the prompt is not valid UTF-8: byte 0xff stands at character 3")
    assert told.count("\n") == 1


def test_invalid_unicode_is_refused_in_python(compiled: Path) -> None:
    model = weft.load(compiled)
    for text, words in (("a\udcff", "byte 0xff stands at character 2"), ("\ud83d", "the half of a pair U\\+D83D")):
        with pytest.raises(WeftError, match=words):
            model.generate(text, max_tokens=1)
    with pytest.raises(WeftError, match="is not valid UTF-8"):
        model.conversation().say("\udc80")
    piped = done("run", compiled, "--max-tokens", 2, input="what is").stdout
    assert piped == done("run", compiled, "--max-tokens", 2, "--prompt", "what is").stdout


def test_terminal_without_a_prompt_gets_a_hint(compiled: Path, tmp_path: Path) -> None:
    status, screen = on_a_terminal("run", compiled, cwd=tmp_path)
    assert status == 2
    assert "--prompt" in screen and "--chat" in screen
    status, screen = on_a_terminal("run", compiled, "--chat", "--seed", "1", cwd=tmp_path)
    assert status == 2 and "nothing is sampled at temperature 0" in screen


def test_progress_appears_on_terminals_only(tiny: Path, tmp_path: Path) -> None:
    status, screen = on_a_terminal("compile", tiny, "-o", tmp_path / "out", cwd=tmp_path)
    assert status == 0
    assert "reading" in screen and "\x1b[" in screen
    piped = done("compile", tiny, "-o", tmp_path / "out")
    assert "\x1b[" not in piped.stdout + piped.stderr


def stub(task: str, labels: tuple[str, ...] = ("bad", "good"), **methods: Any) -> Any:
    return SimpleNamespace(folder="out", task=SimpleNamespace(name=task, labels=labels), **methods)


def span(score: float, text: str) -> Any:
    return SimpleNamespace(score=score, text=text, label="PER", start=0, end=len(text))


def classify(inputs: list[Any]) -> list[dict[str, float]]:
    return [{"good": 0.75, "bad": 0.25} for _ in inputs]


@pytest.mark.parametrize(
    ("model", "pairs", "lines"),
    [
        (stub("question-answering", answer=lambda text, pair: [span(0.5, pair)]), ["a cat"], ["0.5000\ta cat"]),
        (
            stub("multiple-choice", choose=lambda text, pairs: [0.25, 0.75]),
            ["no", "yes"],
            ["0.7500\tyes", "0.2500\tno"],
        ),
        (stub("fill-mask", fill=lambda text: [{"cat": 0.5, "dog": 0.125}]), [], ["0.5000\tcat", "0.1250\tdog"]),
        (stub("token-classification", tag=lambda text: [span(1.0, "Ada")]), [], ["1.0000\tPER\tAda\t0:3"]),
        (
            stub("text-classification", ("score",), rank=lambda text, pairs: [SimpleNamespace(score=0.5, index=1)]),
            ["a", "b"],
            ["0.5000\tb"],
        ),
        (stub("text-classification", classify=classify), [], ["0.7500\tgood", "0.2500\tbad"]),
        (stub("next-sentence-prediction", classify=classify), ["then"], ["0.7500\tgood", "0.2500\tbad"]),
    ],
)
def test_each_answer_is_a_line_after_its_score(
    model: Any, pairs: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    print_task(model, "who is it", pairs)
    assert capsys.readouterr().out.splitlines() == lines


def test_control_characters_of_answers_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_task(stub("fill-mask", fill=lambda text: [{"\x1b[2J": 0.5}]), "x", [])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "text", "pairs", "words"),
    [
        ("question-answering", "who", [], "a question needs one context, not 0: give it by --pair, once"),
        ("question-answering", "who", ["a", "b"], "a question needs one context, not 2: give it by --pair, once"),
        ("multiple-choice", "who", [], "needs at least one choice: give each by --pair"),
        ("fill-mask", "a [MASK]", ["b"], "a model for fill-mask reads one text: leave out --pair"),
        ("fill-mask", [1, 2], [], "--ids needs a model that labels one sequence, and out is for fill-mask"),
        ("text-classification", [1, 2], ["b"], "--ids needs a model that labels one sequence"),
        ("image-classification", "a", [], "which `weft run` does not print: use `weft.load`"),
    ],
)
def test_second_texts_that_a_task_lacks_or_does_not_take_are_refused(
    task: str, text: Any, pairs: list[str], words: str
) -> None:
    with pytest.raises(WeftError, match=words.replace("[", r"\[").replace("?", r"\?")):
        print_task(stub(task, answer=None), text, pairs)
