"""Exit status and error message of commands that fail, are interrupted, or print into a closed pipe."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.frontends.app.cli import cli
from weft.frontends.app.cli.guard import ROWS, explain_unknown
from weft.ir.errors import WeftError

from ...command import WATCHDOG, refused, start, weft_command


def test_closed_pipe_ends_with_status_141_and_no_message(tmp_path: Path) -> None:
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
        (ModuleNotFoundError("No module named 'sympy.core'", name="sympy.core"), 2, "needs the package sympy, which"),
    ],
)
def test_exit_status_and_message_of_each_error(
    error: BaseException, status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_import_error_after_an_interrupt_is_reported_as_interrupt(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_interrupt_during_import_leaves_no_traceback(module: str, root: Path) -> None:
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


EXPECTED = (
    *(
        "chat",
        "generate",
        "finetune",
        "fine-tune",
        "distill",
        "quantize",
        "convert",
        "prune",
        "bench",
        "benchmark",
        "draw",
    ),
    *("draw", "plot", "graph", "show", "info", "summary", "list", "download", "pull", "test", "check", "diff"),
)


@pytest.mark.parametrize("example", [example for _, _, example in ROWS if example.startswith("weft ")])
def test_every_example_is_a_command_line_that_weft_accepts(example: str) -> None:
    _, name, *arguments = shlex.split(example)
    if name.startswith("-"):
        assert name in {option for parameter in cli.params for option in parameter.opts} | {"--help"}
    else:
        cli.commands[name].make_context(name, arguments)


def test_guessed_names_are_no_commands_and_unique() -> None:
    words = [word for names, _, _ in ROWS for word in names.split()]
    assert len(words) == len(set(words)) and set(EXPECTED) <= set(words) and not set(words) & cli.commands.keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chat", "there is no command chat: to talk to a model, use `weft run model.gguf --chat`"),
        ("Quantise", "there is no command Quantise: to store the weights in fewer bits, use `weft compile model.gguf"),
        ("quantze", "there is no command quantze: to store the weights in fewer bits, use `weft compile model.gguf"),
        ("complie", "there is no command complie: did you mean `weft compile`?"),
        ("xyzzyq", "there is no command xyzzyq; see `weft --help`"),
        ("a b.gguf", "a b.gguf is not a command: to inspect a file, use `weft inspect 'a b.gguf'`"),
    ],
)
def test_unknown_command_names_the_right_one(name: str, message: str) -> None:
    assert refused(name, "out/", "--flag").startswith(f"weft: error: {message}")
    assert explain_unknown(name, cli.commands).startswith(message)
