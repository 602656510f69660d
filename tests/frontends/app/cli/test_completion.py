"""Shell completion: the scripts, and the candidates of arguments and options."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete

from weft.frontends.app.cli import cli

from ...command import done


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_of_each_shell(shell: str) -> None:
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
def test_completion_candidates(args: list[str], typed: str, offered: list[str]) -> None:
    found = ShellComplete(cli, {}, "weft", "_WEFT_COMPLETE").get_completions(args, typed)
    assert [item.value for item in found] == offered
