"""The weft command as a whole: its help, its catalogues, its completion, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete

import weft
from weft.frontends.app.cli import cli
from weft.frontends.models.families import FAMILIES
from weft.ir.errors import WeftError

from ...command import WATCHDOG, done, refused, start, weft_command

COMMANDS = (
    *("compile", "run", "inspect", "opt", "heal", "export", "verify", "eval"),
    *("ops", "targets", "passes", "presets", "families", "completion"),
)


# -- help


def test_help_groups_the_commands() -> None:
    text = done("--help").stdout
    sections = re.findall(r"^(\w+):\n((?:  \S.*\n)+)", text, re.MULTILINE)
    listed = {title: [line.split()[0] for line in lines.splitlines()] for title, lines in sections}
    assert listed.pop("Options") == ["--version", "--import", "-h,"]
    assert list(listed) == ["Build", "Run", "Look", "Change", "Trust", "Shell"]
    assert [name for names in listed.values() for name in names] == list(cli.commands)
    assert listed["Build"] == ["compile", "export"] and listed["Trust"] == ["verify"]


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


def test_targets_are_listed_and_shown() -> None:
    from weft.backends.options import OptionKeywords
    from weft.backends.target import TARGETS, collect_options

    rows = {line.split()[0]: line for line in done("targets").stdout.splitlines()[2:]}
    assert [*rows] == [*TARGETS]
    assert "f16, bf16" in rows["ort-cuda"] and "--activations" in rows["torch"]
    shown = done("targets", "ort-cpu").stdout
    assert shown.startswith("ort-cpu: ONNX Runtime on a CPU\n\nruns on: cpu, by ONNX Runtime\n")
    assert "passes that it leaves out: pack-gate-up" in shown and "head | all" in shown
    listed = json.loads(done("targets", "--json").stdout)
    assert [target["name"] for target in listed] == [*TARGETS]
    (one,) = json.loads(done("targets", "torch", "--json").stdout)
    assert one["options"]["cache_dtype"]["default"] == "" and one["dtypes"] == ["f32", "bf16", "f16"]
    assert "did you mean onnx" in refused("targets", "onx")
    assert set(OptionKeywords.__annotations__) == set(collect_options())


def test_options_of_targets_are_flags_of_compile() -> None:
    from weft.backends.target import TARGETS, collect_options

    text = " ".join(done("compile", "--help").stdout.split())
    assert f"The target: {', '.join(TARGETS)};" in text
    for option, targets in collect_options().values():
        assert f"{option.flag} " in text
        assert text.replace("- ", "-").count(f"(target{'s' * (len(targets) > 1)} {', '.join(targets)})")


def test_passes_are_listed_and_shown() -> None:
    listed = done("passes").stdout
    assert "kv-cache" in listed and "default, of encoders" in listed
    assert "dtype" in done("passes", "cast").stdout
    assert "unknown pass" in refused("passes", "casts-spells")


def test_families_are_listed_and_shown() -> None:
    lines = done("families").stdout.splitlines()
    assert lines[0].split() == ["family", "exported", "GGUF"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert rows["llama"] == ["LlamaForCausalLM", "llama+"]
    assert rows["bert"] == ["bert"]  # read from GGUF files, exported to none
    assert {*rows} == {*FAMILIES}
    shown = done("families", "bert").stdout.splitlines()
    assert shown == ["Hugging Face folders: read", "GGUF files of bert: read"]
    shown = done("families", "mistral").stdout.splitlines()
    assert shown == [
        "Hugging Face folders: read, and exported for MistralForCausalLM",
        "GGUF files of llama: read and exported",
    ]
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
        (["targets"], "ort", ["ort-cpu", "ort-cuda"]),
        (["compile"], "--keep", ["--keep-blocks"]),
        (["compile", "--keep-blocks"], "", ["head", "all"]),
        (["passes"], "kv", ["kv-cache"]),
        (["families"], "gemma", ["gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text"]),
        (["presets"], "gp", ["gpt2", "gpt3-175b"]),
    ],
)
def test_completion_offers(args: list[str], typed: str, offered: list[str]) -> None:
    found = ShellComplete(cli, {}, "weft", "_WEFT_COMPLETE").get_completions(args, typed)
    assert [item.value for item in found] == offered


# -- endings


def test_a_closed_pipe_is_no_news(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start("ops", cwd=tmp_path, stdout=writing)
    os.close(writing)
    assert process.communicate(timeout=WATCHDOG) == (None, "")
    assert process.returncode == 141


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
    def fail(*_: object, **__: object) -> Callable[..., Any]:
        raise error

    monkeypatch.setattr("weft.frontends.app.api.source.sources.load_source", fail)
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
    def load(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            lost = ImportError("umath failed to import")  # as numpy's C sources do
        if told:
            raise WeftError(f"ONNX Runtime cannot be imported ({lost})") from lost
        raise lost

    monkeypatch.setattr("weft.frontends.app.api.source.sources.load_source", load)
    result = weft_command("inspect", "gpt2")
    assert (result.exit_code, result.stderr) == (130, "weft: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("module", ["click", "weft.frontends.app.cli.guard", "weft.frontends.app.cli.verify_command"])
def test_an_interrupt_while_the_command_is_imported_leaves_no_traceback(module: str, root: Path) -> None:
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from weft.__main__ import main
main()
"""
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run([sys.executable, "-c", code, "passes"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "weft: interrupted\n")
