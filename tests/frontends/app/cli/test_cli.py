"""The weft command as a whole: its help, its catalogues, its completion, and how it ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import weft
from weft.frontends.app.cli import cli

from ...command import done, start

COMMANDS = (
    *(
        "compile",
        "run",
        "inspect",
        "opt",
        "train",
        "distil",
        "compare",
        "export",
        "verify",
        "bisect",
        "certificate",
        "eval",
    ),
    *("ops", "targets", "passes", "presets", "families", "completion"),
)


# -- help


def test_help_groups_the_commands() -> None:
    text = done("--help").stdout
    sections = re.findall(r"^(\w+):\n((?:  \S.*\n)+)", text, re.MULTILINE)
    listed = {title: [line.split()[0] for line in lines.splitlines()] for title, lines in sections}
    assert listed.pop("Options") == ["--version", "--import", "-h,"]
    assert list(listed) == ["Build", "Run", "Look", "Train", "Change", "Trust", "Shell"]
    assert {name for names in listed.values() for name in names} == cli.commands.keys() - {"heal"}  # an earlier name
    assert listed["Build"] == ["compile", "export"] and listed["Trust"] == ["verify", "bisect", "certificate"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    text = done(command, "--help").stdout
    assert "Examples:" in text
    assert f"weft {command}" in text


def test_command_without_arguments_prints_help() -> None:
    assert done().stdout == done("--help").stdout
    assert all(f"  {command} " in done().stdout for command in COMMANDS)


def test_version_option_prints_the_version() -> None:
    assert done("--version").stdout == f"weft {weft.__version__}\n"


def test_python_m_weft_runs_the_command(tmp_path: Path) -> None:
    process = start("--version", cwd=tmp_path)
    assert process.communicate() == (f"weft {weft.__version__}\n", "")


# -- catalogues and completion


# -- endings
