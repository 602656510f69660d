"""Functions that open the encoder or decoder of a folder of ONNX models."""

from __future__ import annotations

from typing import Any

from ...folder_facts import FolderFacts
from ...target import TARGETS
from .ort_decoder import OrtDecoder
from .ort_encoder import OrtEncoder
from .session import Session, open_session


def open_encoder(facts: FolderFacts, device: str, threads: int | None) -> OrtEncoder:
    """Return the encoder of an ONNX folder on `device` ("auto", "cpu" or "cuda"). Raises WeftError when a file or the
    device cannot be used."""
    return OrtEncoder(_open_session(facts, 0, device, threads), facts)  # no graphs: shapes vary


def open_decoder(facts: FolderFacts, device: str, threads: int | None, stream: Any = None) -> OrtDecoder:
    """Return the decoder of a folder, with the encoder of an encoder-decoder; it runs on the PyTorch `stream` if given.
    Raises as `open_encoder` does."""
    session = _open_session(facts, 0, device, threads, graphs=True, stream=stream)
    encoder = _open_session(facts, 1, device, threads) if facts.kind == "encoder-decoder" else None
    return OrtDecoder(session, facts, encoder)


def _open_session(facts: FolderFacts, file: int, device: str, threads: int | None, **options: Any) -> Session:
    return open_session(facts.files[file], device=device, threads=threads, target=TARGETS[facts.target], **options)
