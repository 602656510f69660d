"""Options that commands share: values that they pass on, their help, and values that they refuse."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from weft.backends.target import TARGETS
from weft.frontends.app.cli.options import (
    adapter_option,
    add_loading_options,
    add_passes_option,
    device_option,
    family_option,
    seed_option,
)


@click.command()
@device_option
@add_loading_options
def opening(**options: Any) -> None:
    click.echo(repr(options))


@click.command()
@seed_option
@adapter_option
@family_option
@add_passes_option("the passes", "steps", multiple=True)
def reading(**options: Any) -> None:
    click.echo(repr(options))


def test_loading_options_have_defaults_that_leave_everything_as_it_is() -> None:
    assert eval(CliRunner().invoke(opening).stdout) == {
        "device": "auto",
        "threads": None,
        "trust": False,
        "check": False,
        "adapters": (),
        "without": (),
        "target": None,
    }


def test_adapters_passes_and_parts_may_be_repeated_in_order() -> None:
    args = ["--adapter", "b", "--adapter", "a", "-p", "dce", "--passes", "cse", "--as", "llama", "--seed", "-1"]
    given = eval(CliRunner().invoke(reading, args).stdout)
    assert given == {"adapters": ("b", "a"), "steps": ("dce", "cse"), "family": "llama", "seed": -1}
    given = eval(CliRunner().invoke(opening, ["--without", "x", "--without", "y"]).stdout)
    assert given["without"] == ("x", "y")


def test_unknown_devices_and_zero_threads_are_refused() -> None:
    for args, words in ((["--device", "tpu"], "'tpu' is not one of"), (["--threads", "0"], "0 is not in the range")):
        result = CliRunner().invoke(opening, args)
        assert result.exit_code == 2 and words in result.stderr


def test_help_of_target_lists_the_targets_each_time() -> None:
    for _ in range(2):
        text = " ".join(CliRunner().invoke(opening, ["--help"]).stdout.split()).replace("- ", "-")
        assert f"Target for a SOURCE that is not compiled: {', '.join(TARGETS)}; default: ONNX Runtime" in text


def test_passes_and_families_complete_by_name() -> None:
    complete = ShellComplete(reading, {}, "weft", "_WEFT_COMPLETE").get_completions
    assert [item.value for item in complete(["-p"], "kv")] == ["kv-cache"]
    assert "gemma2" in [item.value for item in complete(["--as"], "gemma")]
