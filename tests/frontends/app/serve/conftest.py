"""The tiny model, and a server of it for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from weft.backends.runtime.core.generation import Generator
from weft.frontends.app.serve.server import Server

from .serving import client as official
from .serving import compiled, opened, served


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Generator:
    """The same model, by itself."""
    return opened(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with official(server) as found:
        yield found
