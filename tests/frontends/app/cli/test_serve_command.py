"""The command: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from ....sampling import others_long
from ...command import WATCHDOG, refused, start
from ..serve.serving import compiled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("serve") / "tiny")


@contextmanager
def serving(*args: str | Path, cwd: Path) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """`weft serve` on a free port: the process, its address, and what it prints before."""
    process = start("serve", *args, "--port", "0", cwd=cwd)
    lines: list[str] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if found := re.search(r"at (http://\S+/v1)", line):
                yield process, found[1], lines
                break
        else:
            raise AssertionError(lines)
    finally:
        process.terminate()
        process.communicate(timeout=WATCHDOG)


@pytest.mark.parametrize("number", others_long([signal.SIGINT, signal.SIGTERM]))
def test_server_prints_its_address_and_ends_at_a_signal(folder: Path, tmp_path: Path, number: int) -> None:
    with serving(folder, cwd=tmp_path) as (process, address, lines):
        assert lines == [f"weft: serving tiny at {address}; Ctrl-C ends"]
        assert address.startswith("http://127.0.0.1:")
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            answer = client.completions.create(model="tiny", prompt="hi", max_tokens=3)
            assert answer.usage is not None and answer.usage.completion_tokens == 3
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=WATCHDOG)
    assert (process.returncode, stdout, stderr) == (0, "", "weft: the server has ended\n")


def test_api_key_from_the_environment(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_API_KEY", "secret")
    with serving(folder, "--model-name", "mine", cwd=tmp_path) as (_, address, _lines):
        for key, good in (("secret", True), ("other", False)):
            with openai.OpenAI(base_url=address, api_key=key, max_retries=0) as client:
                if good:
                    assert [model.id for model in client.models.list()] == ["mine"]
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()


@pytest.mark.long
def test_a_source_is_compiled_for_the_run(tmp_path: Path, minilm_folder: Path) -> None:
    with serving(minilm_folder, "--threads", "1", cwd=tmp_path) as (_, address, lines):
        compiling = f"weft: compiling {minilm_folder} with ONNX Runtime"
        assert any(line.startswith(compiling) for line in lines)
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            vectors = client.embeddings.create(model="all-MiniLM-L6-v2", input=["a cat", "a kitten", "a tax form"])
    cat, kitten, form = (item.embedding for item in vectors.data)
    assert len(cat) == 384
    assert (
        sum(a * b for a, b in zip(cat, kitten, strict=True)) > 0.5 > sum(a * b for a, b in zip(cat, form, strict=True))
    )


def test_a_port_in_use_is_refused(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused("serve", folder, "--port", port)
    assert line == f"weft: error: port {port} of 127.0.0.1 is in use: choose another with --port"


def test_sources_and_options_that_cannot_be_served_are_refused(folder: Path, tmp_path: Path) -> None:
    assert "neither a preset nor" in refused("serve", tmp_path / "nothing", "--port", 0)
    (tmp_path / "empty").mkdir()
    refused("serve", tmp_path / "empty", "--port", 0)
    assert "has no tokenizer" in refused("serve", "gpt2", "--port", 0)
    assert "192.0.2.1 cannot be used" in refused("serve", folder, "--host", "192.0.2.1")  # of documentation alone
    assert "API key" in refused("serve", folder, "--port", 0, "--api-key", "")
    assert "--target applies to uncompiled" in refused("serve", folder, "--port", 0, "--target", "torch")


def test_a_compiled_folder_without_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "mute")
    (tmp_path / "mute" / "tokenizer.json").unlink()
    assert "has no tokenizer" in refused("serve", tmp_path / "mute", "--port", 0)


@pytest.mark.parametrize("module", ["starlette", "uvicorn", "pydantic", "llguidance"])
def test_missing_dependency_is_named(folder: Path, tmp_path: Path, module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from weft.frontends.app.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(folder), "--port", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 2
    wanted = f"weft: error: weft serve needs {module}, which is not installed: install weft[serve]\n"
    assert done.stderr == wanted


def test_options_beyond_their_range_are_refused(folder: Path) -> None:
    for option in ("--drain", "--client-timeout"):
        for value in ("nan", "inf", "-inf", "-1", "1e400", "x"):
            assert option in refused("serve", folder, "--port", 0, f"{option}={value}")
    for option in ("--max-body", "--max-queue", "--max-batch", "--threads"):
        assert option in refused("serve", folder, "--port", 0, option, "9" * 400)
    for name in ("a\nb", "\x1b[2J", "\u202e"):
        assert "--model-name" in refused("serve", folder, "--port", 0, "--model-name", name)
