"""Functions that open the encoder or decoder of a folder of ONNX models."""

from __future__ import annotations

from typing import Any

from ...folder_facts import FolderFacts
from ...target import TARGETS
from .cross_attention import SourceEncoder
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
    session, sources = _open_session(facts, 0, device, threads, graphs=True, stream=stream), None
    if facts.kind == "encoder-decoder":
        encoder_half = _open_session(facts, 1, device, threads)
        sources = SourceEncoder(
            encoder_half, facts.start, facts.max_source, str(facts.files[1]), facts.compares, facts.sound
        )
    return OrtDecoder(
        session,
        vocab=facts.vocab,
        max_length=facts.max_length,
        head_dim=facts.head_dim,
        name=str(facts.model),
        carried=facts.states,
        rolling=facts.rolling,
        compares=facts.compares,
        rounds=facts.rounds,
        sources=sources,
    )


def _open_session(facts: FolderFacts, file: int, device: str, threads: int | None, **options: Any) -> Session:
    return open_session(facts.files[file], device=device, threads=threads, target=TARGETS[facts.target], **options)
