"""The recipes of docs/deploy.md, without the parts that the page itself runs: container, program sizes, packages."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weft

DEPLOY = Path(__file__).resolve().parents[1] / "examples" / "deploy"
SECONDS = 60  # after which a test fails instead of waiting
UNUSED = ("sympy", "mpmath", "huggingface_hub", "hf_xet")  # dependencies of packages, not needed to run a folder


def read_instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) of the last stage of the Dockerfile."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    last = max(i for i, (name, _, _) in enumerate(lines) if name == "FROM")
    return [(name, arguments.strip()) for name, _, arguments in lines[last:]]


@pytest.fixture(scope="module")
def instructions() -> dict[str, str]:
    return dict(read_instructions())


@pytest.fixture(scope="module")
def folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deploy") / "model"
    weft.compile(smollm2_gguf, folder, weights="int4", max_length=128)
    return folder


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **more}


@pytest.fixture
def port(instructions: dict[str, str], folder: Path) -> Iterator[int]:
    """The port of a server that the entry point of the image has started, for `folder` and on this machine only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    replaced = {"weft": None, "/model": str(folder), "0.0.0.0": "127.0.0.1", "8000": str(port)}
    command = [replaced.get(word, word) for word in json.loads(instructions["ENTRYPOINT"])]
    assert set(replaced) <= {*json.loads(instructions["ENTRYPOINT"])}
    server = subprocess.Popen([sys.executable, "-m", "weft", *filter(None, command)], env=environment())
    yield port
    server.send_signal(signal.SIGTERM)
    assert server.wait(SECONDS) == 0


def check_health(instructions: dict[str, str], port: int) -> int:
    """Run the command of the health check for a server at `port`; return its exit status."""
    python, *command = json.loads(instructions["HEALTHCHECK"].partition(" CMD ")[2])
    assert python == "python"
    command = [word.replace(":8000/", f":{port}/") for word in command]
    done = subprocess.run([sys.executable, *command], env=environment(), capture_output=True, timeout=SECONDS)
    return done.returncode


@pytest.mark.long
def test_health_check_passes_once_the_entry_point_serves(instructions: dict[str, str], port: int) -> None:
    end = time.monotonic() + SECONDS
    while check_health(instructions, port) != 0:
        assert time.monotonic() < end, "the server does not answer"
        time.sleep(0.2)


def test_health_check_fails_without_a_server(instructions: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        assert check_health(instructions, taken.getsockname()[1]) != 0


def test_container_runs_as_a_user_without_privileges() -> None:
    names = [name for name, _ in read_instructions()]
    user = dict(read_instructions())["USER"]
    assert user.isdecimal() and int(user) > 0  # a number, so that Kubernetes can check runAsNonRoot
    assert any(f"--uid {user} " in arguments for name, arguments in read_instructions() if name == "RUN")
    assert "RUN" not in names[names.index("USER") :] and "ADD" not in names


def test_image_is_built_from_fixed_versions() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert bases and all(re.fullmatch(r"python:3\.\d+-slim", base) for base in bases)
    (install,) = (arguments for name, arguments in read_instructions() if "pip install" in arguments)
    words = shlex.split(install.partition(" && ")[0])
    assert words[words.index("-c") + 1].endswith("/constraints.txt") and "--no-cache-dir" in words


@pytest.mark.parametrize("name", ["run.cpp", "run.cs"])
def test_programs_are_short(name: str) -> None:
    assert len((DEPLOY / name).read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.long
def test_compiled_folders_run_and_are_served_without_unused_dependencies(folder: Path) -> None:
    code = """
import sys
for name in sys.argv[2:]:
    sys.modules[name] = None  # an import of it raises
import weft
import weft.frontends.app.serve.server
print(weft.load(sys.argv[1]).generate('The capital of France is', max_tokens=5)[0].tokens)
"""
    command: list[Any] = [sys.executable, "-c", code, folder, *UNUSED]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    (wanted,) = weft.load(folder).generate("The capital of France is", max_tokens=5)
    assert (done.returncode, done.stdout.strip()) == (0, str(wanted.tokens)), done.stderr
