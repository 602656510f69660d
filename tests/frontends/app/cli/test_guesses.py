"""Names of commands that weft does not have."""

from __future__ import annotations

import shlex

import pytest

from weft.frontends.app.cli import cli
from weft.frontends.app.cli.guesses import ROWS, explain_unknown

from ...command import refused

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
