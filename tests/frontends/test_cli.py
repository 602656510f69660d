"""The weft command: what it prints, how it ends, and what it leaves behind."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

import weft
from weft.backends.runtime import session
from weft.frontends.cli import cli
from weft.ir.errors import WeftError

TINY = """
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

block = Block(Attention(heads=4, kv_heads=2, rope=RoPE()), GatedMLP(48), RMSNorm())
model = Decoder(vocab=12, dim=32, layers=3, block=block, context=64)
"""
WORDS = ["<s>", "</s>", "user", "assistant", "hello", "there", "what", "is", "the", "sky", "blue", "."]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
COMMANDS = (
    *("compile", "run", "inspect", "opt", "export", "verify", "eval"),
    *("ops", "passes", "presets", "families", "completion"),
)


def weft_command(*args: str | Path, **options: Any) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args], **options)


def done(*args: str | Path, **options: Any) -> Result:
    result = weft_command(*args, **options)
    assert result.exit_code == 0, result.stderr
    return result


def refused(*args: str | Path, **options: Any) -> str:
    """The one line that a command which exits with 2 prints."""
    result = weft_command(*args, **options)
    assert result.exit_code == 2, (result.exit_code, result.output)
    (line,) = result.stderr.splitlines()
    assert line.startswith("weft: error: ")
    return line


def start(*args: str | Path, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """The command in a process of its own, in which SIGINT interrupts even where the tests run in the background."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if "largest" in options:
            resource.setrlimit(resource.RLIMIT_FSIZE, (options["largest"], options["largest"]))

    streams = {s: options.get(s, subprocess.PIPE) for s in ("stdin", "stdout", "stderr")}
    command = [sys.executable, "-m", "weft", *map(str, args)]
    return subprocess.Popen(command, cwd=cwd, text=True, preexec_fn=prepare, **streams)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """An architecture file."""
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return path


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


# -- help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    text = done(command, "--help").stdout
    assert "Examples:" in text
    assert f"weft {command}" in text


def test_the_bare_command_is_help() -> None:
    assert done().stdout == done("--help").stdout
    assert all(f"  {command} " in done().stdout for command in COMMANDS)


def test_version() -> None:
    assert done("--version").stdout == f"weft {weft.__version__}\n"


def test_python_m_weft(tmp_path: Path) -> None:
    process = start("--version", cwd=tmp_path)
    assert process.communicate() == (f"weft {weft.__version__}\n", "")


# -- compile


def test_compile_writes_a_folder_and_says_what_is_random(tiny: Path, tmp_path: Path) -> None:
    result = done("compile", tiny, "-o", tmp_path / "out", "--seed", 3, "--max-length", 32)
    assert "architecture tiny.py:model" in result.stdout
    assert result.stderr == "weft: architecture tiny.py:model has no checkpoint: its weights are random (seed 3)\n"
    manifest = json.loads((tmp_path / "out/weft.json").read_text())
    assert manifest["max_length"] == 32 and manifest["source"]["seed"] == 3
    assert manifest["source"]["spec"] == str(tiny)


def test_compile_dumps_and_verifies(tiny: Path, tmp_path: Path) -> None:
    done("compile", tiny, "-o", tmp_path / "out", "--dump-ir", tmp_path / "steps", "--verify", "--passes", "pack-qkv")
    assert [p.name for p in sorted((tmp_path / "steps").iterdir())] == ["00-input.weft", "01-pack-qkv.weft"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-p", "fuse-everything"), ("unknown pass 'fuse-everything'",)),
        (("-p", "cast{dtyp=f16}"), ("no argument 'dtyp'", "dtype")),
        (("-p", "cast{dtype=f17}"), ("f17",)),
        (("--dtype", "bf16"), ("ort-cpu cannot compute in bf16", "f32")),
        (("--dtype", "f8"), ("unknown dtype 'f8'; known are f32",)),
        (("--target", "ort-gpu"), ("unknown target 'ort-gpu'", "ort-cpu")),
        (("--max-length", "0"), ("--max-length 0",)),
        (("--max-length", "many"), ("many", "weft compile --help")),
        (("--max-lenght", "9"), ("--max-lenght", "weft compile --help")),
    ],
)
def test_bad_options_leave_the_older_result(
    tiny: Path, tmp_path: Path, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done("compile", tiny, "-o", tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    line = refused("compile", tiny, "-o", tmp_path / "out", *args)
    assert all(word in line for word in words)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert {p.name for p in tmp_path.iterdir()} <= {"tiny.py", "out", "__pycache__"}


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/config.json").write_text('{"model_type": "nonesuch"}')
    assert "nonesuch" in refused("compile", tmp_path / "strange", "-o", tmp_path / "out")
    assert "smollm2-135m" in refused("compile", "smollm2-135n", "-o", tmp_path / "out")
    (tmp_path / "broken.py").write_text("model = nothing")
    assert "broken.py:1" in refused("compile", tmp_path / "broken.py", "-o", tmp_path / "out")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    assert "broken.gguf" in refused("inspect", tmp_path / "broken.gguf")


def test_a_folder_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "in the way" in refused("compile", tiny, "-o", tmp_path / "file")
    assert str(tmp_path / "file/out") in refused("compile", tiny, "-o", tmp_path / "file/out")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.jpg").write_text("mine")
    assert "photos" in refused("compile", tiny, "-o", tmp_path / "photos")
    assert (tmp_path / "photos/a.jpg").read_text() == (tmp_path / "file").read_text() == "mine"


def large(tmp_path: Path) -> Path:
    """An architecture of 800 MB, which takes seconds to write."""
    path = tmp_path / "large.py"
    path.write_text(TINY.replace("vocab=12, dim=32", "vocab=200_000, dim=1024"))
    return path


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_compile_leaves_nothing(tmp_path: Path, number: signal.Signals, status: int) -> None:
    source = large(tmp_path)
    process = start("compile", source, "-o", tmp_path / "out", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not any(f.stat().st_size for f in tmp_path.glob(".out.partial-*/model.onnx.data")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (status, "")
    assert err in ("weft: interrupted\n", "weft: terminated\n")
    assert {p.name for p in tmp_path.iterdir()} <= {"large.py", "__pycache__"}


def test_a_full_disk_is_one_sentence(tiny: Path, tmp_path: Path) -> None:
    process = start("compile", tiny, "-o", tmp_path / "out", cwd=tmp_path, largest=20_000)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith(f"weft: error: cannot write to {tmp_path / 'out'}: ") and err.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} <= {"tiny.py", "__pycache__"}


def test_a_disk_full_of_weights_has_no_room_for_a_tokenizer(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def full(path: Path, *args: Any, **options: Any) -> int:
        if path.name == "tokenizer.json":
            raise OSError(28, "No space left on device", str(path))
        return write(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", full)
    assert "the disk is full" in refused("compile", smollm2_gguf, "--max-length", "16", "-o", tmp_path / "out")
    assert not any(tmp_path.iterdir())


# -- run


def test_run_streams_the_answer_and_times_it(compiled: Path) -> None:
    result = done("run", compiled, "--prompt", "what is the sky", "--max-tokens", "5")
    expected = weft.load(compiled).generate("what is the sky", max_tokens=5)
    assert result.stdout == f"{expected[0].text}\n"
    assert "4 prompt tokens" in result.stderr and "then 5 tokens at" in result.stderr


def test_run_reads_a_piped_prompt(compiled: Path) -> None:
    piped = done("run", compiled, "--max-tokens", "5", input="what is the sky\n")
    assert piped.stdout == done("run", compiled, "--max-tokens", "5", "--prompt", "what is the sky").stdout


def test_run_draws_the_same_with_a_seed(compiled: Path) -> None:
    args = ("run", compiled, "--prompt", "the sky", "--top-p", "0.9", "--seed", "1")
    assert done(*args).stdout == done(*args).stdout != done(*args[:-2]).stdout


def test_run_stops_at_a_text(compiled: Path) -> None:
    text = done("run", compiled, "--prompt", "the sky", "--max-tokens", "8").stdout.strip()
    word = text.split()[2]
    cut = done("run", compiled, "--prompt", "the sky", "--max-tokens", "8", "--stop", word).stdout.strip()
    assert cut == text.partition(word)[0].strip()


def test_run_chats_by_the_template(compiled: Path) -> None:
    plain = done("run", compiled, "--prompt", "user hello assistant", "--max-tokens", "6")
    assert done("run", compiled, "--chat", "--prompt", "hello", "--max-tokens", "6").stdout == plain.stdout
    told = done("run", compiled, "--chat", "--system", "the sky", "--prompt", "hello", "--max-tokens", "6")
    assert "6 prompt tokens" in told.stderr


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


def test_run_compiles_a_source_first(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = done("run", smollm2_gguf, "--device", "cpu", "--chat", "--prompt", "What is the capital of France?")
    assert "Paris" in result.stdout
    assert f"compiling {smollm2_gguf} for this run" in result.stderr
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
        (("--prompt", "sky", "--normalize"), ("no encoder", "--normalize")),
    ],
)
def test_bad_requests_to_run(compiled: Path, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    line = refused("run", compiled, *args)
    assert all(word in line for word in words)


def test_a_source_without_a_tokenizer_is_not_compiled_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "never"))
    assert "no tokenizer" in refused("run", "llama3.1-405b", "--prompt", "x", "--device", "cpu")


def test_a_device_that_is_not_there(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "missing_cuda", lambda ort: "the NVIDIA driver sees no GPU")
    assert refused("run", tiny, "--prompt", "x", "--device", "cuda").endswith("sees no GPU")


def test_an_encoder_embeds_and_does_not_chat(minilm_folder: Path, tmp_path: Path) -> None:
    done("compile", minilm_folder, "-o", tmp_path / "out")
    mean, first, unit = (
        np.array(json.loads(done("run", tmp_path / "out", "--prompt", "hello", *options).stdout))
        for options in (("--no-normalize",), ("--pooling", "cls", "--no-normalize"), ())
    )
    assert mean.shape == first.shape == (384,) and np.abs(mean - first).max() > 0.01
    np.testing.assert_allclose(unit, mean / np.linalg.norm(mean), atol=1e-6)
    for option in (["--chat"], ["--beams", "2"]):
        assert "encoder" in refused("run", tmp_path / "out", "--prompt", "hello", *option)


def test_run_without_a_compiled_model(tmp_path: Path) -> None:
    assert "nothing" in refused("run", tmp_path / "nothing", "--prompt", "x")


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
            os.write(ours, typed[answered].encode())
            answered += 1
        if not some:
            break
    else:
        process.kill()
    os.close(ours)
    return process.wait(60), screen.decode()


def test_a_conversation_on_a_terminal(compiled: Path, tmp_path: Path) -> None:
    typed = ["hello\n", "\n", "sky " * 70 + "\n", "what is blue\n", "\x04"]
    status, screen = on_a_terminal("run", compiled, "--chat", "--max-tokens", "3", cwd=tmp_path, typed=typed)
    assert status == 0
    assert screen.count("prompt tokens in") == 2
    assert screen.count("weft: error: a prompt of") == 1
    assert "Traceback" not in screen


def test_a_terminal_without_a_prompt_is_told_what_to_give(compiled: Path, tmp_path: Path) -> None:
    status, screen = on_a_terminal("run", compiled, cwd=tmp_path)
    assert status == 2
    assert "--prompt" in screen and "--chat" in screen


def test_progress_is_for_terminals(tiny: Path, tmp_path: Path) -> None:
    status, screen = on_a_terminal("compile", tiny, "-o", tmp_path / "out", cwd=tmp_path)
    assert status == 0
    assert "reading" in screen and "\x1b[" in screen
    process = start("compile", tiny, "-o", tmp_path / "out", cwd=tmp_path)
    assert "\x1b[" not in "".join(process.communicate(timeout=60))


def test_a_closed_pipe_is_no_news(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start("ops", cwd=tmp_path, stdout=writing)
    os.close(writing)
    assert process.communicate(timeout=60) == (None, "")
    assert process.returncode == 141


# -- opt


def test_opt_rewrites_text_and_pipes_on(tiny: Path, tmp_path: Path) -> None:
    text = done("opt", tiny).stdout
    assert done("opt", "-", input=text).stdout == text
    packed = done("opt", "-", "-p", "pack-qkv", "--trace", input=text)
    assert packed.stdout == done("opt", tiny, "-p", "pack-qkv").stdout != text
    assert "pack-qkv: 3 rewrites" in packed.stderr
    done("opt", tiny, "-p", "default", "--verify", "-o", tmp_path / "a.weft", "--dump-ir", tmp_path / "steps")
    assert done("opt", tmp_path / "a.weft").stdout == (tmp_path / "a.weft").read_text()
    assert (tmp_path / "steps/00-input.weft").read_text() == text


def test_opt_tells_what_was_done_shown_and_left(tiny: Path) -> None:
    """A named pass that did nothing is worth a line, one of the default pipeline is not."""
    traced = done("opt", tiny, "-p", "default, drop-k-bias", "--trace", "-o", os.devnull).stderr
    assert "  pack-qkv: rewrote %layers.0.attn.q (× 3)" in traced and " FLOPs for 64 tokens, " in traced
    quiet = done("opt", tiny, "-p", "default, pack-qkv", "-o", os.devnull).stderr
    assert quiet.startswith("weft: pack-qkv rewrote nothing: ") and quiet.count("\n") == 1
    verified = done("opt", tiny, "-p", "pack-qkv, kv-cache", "--verify", "-o", os.devnull).stderr.splitlines()
    assert [line.partition("): ")[0] for line in verified] == ["weft: pack-qkv (exact", "weft: kv-cache (conditional"]
    assert verified[1].endswith("(two ways for models above a million parameters).")


def test_opt_of_a_checkpoint_goes_through_a_pipe(minilm_folder: Path) -> None:
    text = done("opt", minilm_folder).stdout
    assert done("opt", "-", "-p", "cse, dce", input=text).stdout == done("opt", minilm_folder, "-p", "cse, dce").stdout


def test_text_errors_have_line_and_column(tiny: Path, tmp_path: Path) -> None:
    lines = done("opt", tiny).stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if " = linear(" in line)
    wrong = {
        "syntax": ([*lines[:at], lines[at].replace("linear(", "linear["), *lines[at + 1 :]], "expected '('"),
        "type": ([*lines[:at], lines[at].replace("f32[", "f16["), *lines[at + 1 :]], "declared f16"),
        "op": ([*lines[:at], lines[at].replace("linear(", "linaer("), *lines[at + 1 :]], "did you mean linear"),
    }
    for name, (text, words) in wrong.items():
        path = tmp_path / f"{name}.weft"
        path.write_text("\n".join(text))
        line = refused("opt", path)
        assert f"{path}:{at + 1}:" in line and words in line
        assert f"<stdin>:{at + 1}:" in refused("opt", "-", input="\n".join(text))


@pytest.mark.parametrize("pipeline", ["dce,", "dce cse", "dce{", "nothing", "dce{now=true}", "-cse"])
def test_bad_pipelines_are_one_line(tiny: Path, pipeline: str) -> None:
    assert "pipeline" in refused("opt", tiny, f"--passes={pipeline}")


def test_opt_keeps_an_older_file(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.weft").write_text("older")
    refused("opt", tiny, "-p", "nothing", "-o", tmp_path / "a.weft")
    assert (tmp_path / "a.weft").read_text() == "older"
    assert "holds files that weft did not write" in refused("opt", tiny, "-o", tmp_path)
    assert "no such file" in refused("opt", tiny, "-o", tmp_path / "nowhere/a.weft")
    assert {p.name for p in tmp_path.iterdir()} <= {"a.weft", "tiny.py", "__pycache__"}


def test_opt_writes_into_pipes_and_through_links(tiny: Path, tmp_path: Path) -> None:
    text = done("opt", tiny).stdout
    os.mkfifo(tmp_path / "pipe")
    process = start("opt", tiny, "-o", tmp_path / "pipe", cwd=tmp_path)
    assert (tmp_path / "pipe").read_text() == text
    assert process.communicate(timeout=60) == ("", "") and (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to("a.weft")
    done("opt", tiny, "-o", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a.weft").read_text() == text


# -- catalogues and completion


def test_ops_are_listed_and_shown() -> None:
    from weft.ir.op import OPS

    listed = done("ops").stdout
    assert all(name in listed for name in OPS)
    shown = done("ops", "attention").stdout
    assert all(word in shown for word in ("kv_heads", "GroupQueryAttention", "ort-cuda", "f32[", "softmax"))
    assert "did you mean attention" in refused("ops", "atention")


@pytest.mark.parametrize("name", ["rms_norm", "concat", "embedding", "moe"])
def test_every_kind_of_op_can_be_shown(name: str) -> None:
    assert done("ops", name).stdout.startswith(f"{name}(")


def test_passes_are_listed_and_shown() -> None:
    listed = done("passes").stdout
    assert "kv-cache" in listed and "default, of encoders" in listed
    assert "dtype" in done("passes", "cast").stdout
    assert "unknown pass" in refused("passes", "casts-spells")


def test_families_are_listed_with_their_errors() -> None:
    lines = done("families").stdout.splitlines()
    assert lines[0].split() == ["family", "target", "full", "chunked", "decode"]
    rows = lines[2 : lines.index("")]
    families = [line.split()[0] for line in rows if not line.startswith(" ")]
    assert lines[-1].startswith("in GGUF files: bert, bloom, ")
    assert {"llama", "gemma2", "bert"} <= set(families)
    assert len(rows) == 2 * len(families)
    shown = done("families", "bert").stdout.splitlines()
    assert [line.split()[:-1] for line in shown[2:]] == [["bert", "onnx"], ["ort-cpu"]]
    assert "did you mean gemma2" in refused("families", "gema2")


def test_presets_are_listed_and_shown() -> None:
    rows = {line.split()[0]: line.split()[1:] for line in done("presets").stdout.splitlines() if line}
    assert " ".join(rows["deepseek-v3"]).startswith("671 G 37.6 G 68.6 KiB 163,840 DeepSeek-V3")
    assert " ".join(rows["mistral-7b"]).startswith("7.24 G 128.0 KiB 32,768 Mistral")
    assert " ".join(rows["mamba-2.8b"]).startswith("2.77 G 21.9 MiB Mamba")
    shown = done("presets", "gpt2").stdout
    assert "Decoder(" in shown and "124,439,808 parameters" in shown
    assert "gpt2" in refused("presets", "gpt-2")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    assert "_WEFT_COMPLETE" in done("completion", shell).stdout


@pytest.mark.parametrize(
    ("args", "typed", "offered"),
    [
        ([], "ins", ["inspect"]),
        (["compile"], "smol", ["smollm2-135m", "smol"]),
        (["compile", "--target"], "ort-c", ["ort-cpu", "ort-cuda"]),
        (["compile", "--target", "ort-cuda", "--dtype"], "", ["f16", "bf16"]),
        (["compile", "-p"], "default,-last", ["default,-last-token-logits"]),
        (["opt", "-p"], "dce, kv", ["dce, kv-cache"]),
        (["opt", "-p"], "dce, rolling-buffer{length=8, sl", ["dce, rolling-buffer{length=8, slack="]),
        (["opt", "-p"], "fold-scale{", ["fold-scale{untie=true", "fold-scale{untie=false"]),
        (["opt", "-p"], "fold-scale{untie=true,", []),
        (["opt", "-p"], "nonesuch{", []),
        (["eval", "-p"], "mine=kv", ["mine=kv-cache"]),
        (["eval", "-p"], "mine=cse,kv", ["mine=cse,kv-cache"]),
        (["ops"], "rms", ["rms_norm"]),
        (["passes"], "kv", ["kv-cache"]),
        (["families"], "gemma", ["gemma", "gemma2", "gemma3_text"]),
        (["presets"], "gp", ["gpt2", "gpt3-175b"]),
    ],
)
def test_completion_offers(args: list[str], typed: str, offered: list[str]) -> None:
    found = ShellComplete(cli, {}, "weft", "_WEFT_COMPLETE").get_completions(args, typed)
    assert [item.value for item in found] == offered


# -- the system's refusals


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (OSError(28, "No space left on device"), 2, "the disk is full"),
        (PermissionError(13, "Permission denied", "/x"), 2, "/x: permission denied"),
        (MemoryError(), 2, "not enough memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
    ],
)
def test_every_end_has_a_status(error: BaseException, status: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Callable[..., Any]:
        raise error

    monkeypatch.setattr("weft.frontends.sources.load_source", fail)
    result = weft_command("inspect", "gpt2")
    assert result.exit_code == status
    assert words in result.stderr and result.stderr.count("\n") == bool(words)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts even where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("told", [True, False])
def test_an_interrupt_while_something_loads_is_one(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            lost = ImportError("umath failed to import")  # as numpy's C sources do
        if told:
            raise WeftError(f"ONNX Runtime cannot be imported ({lost})") from lost
        raise lost

    monkeypatch.setattr("weft.frontends.sources.load_source", load)
    result = weft_command("inspect", "gpt2")
    assert (result.exit_code, result.stderr) == (130, "weft: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_token_ids_for_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "from weft import Attention, Block, Decoder\nmodel = Decoder(11, 8, 2, Block(Attention(2)), context=16)\n"
    )
    answer = done("run", tmp_path / "model.py", "--ids", "3,1,4", "--max-tokens", "2")
    assert len(answer.stdout.strip().split(",")) == 2
    assert "then 2 tokens" in answer.stderr
    assert "--ids" in refused("run", tmp_path / "model.py", "--prompt", "hello")
    assert "1,15,7" in refused("run", tmp_path / "model.py", "--ids", "3,x")
    assert "--prompt" in refused("run", tmp_path / "model.py", "--ids", "3", "--prompt", "x")
