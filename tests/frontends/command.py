"""The weft command in tests: within this process, or in one of its own."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from weft.frontends.app.cli import cli

TINY = """
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

block = Block(Attention(heads=4, kv_heads=2, rope=RoPE()), GatedMLP(48), RMSNorm())
model = Decoder(vocab=12, dim=32, layers=3, block=block, context=64)
"""


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


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let files grow to `size` bytes only, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


WATCHDOG = 900  # seconds for what takes one on an idle machine: only a process that hangs needs more on a busy one


def start(*args: str | Path, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """The command in a process of its own, in which SIGINT interrupts even where the tests run in the background."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    streams = {s: options.get(s, subprocess.PIPE) for s in ("stdin", "stdout", "stderr")}
    command = [sys.executable, "-m", "weft", *map(str, args)]
    return subprocess.Popen(command, cwd=cwd, text=True, preexec_fn=prepare, **streams)
