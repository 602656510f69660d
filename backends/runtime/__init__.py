"""Running compiled models: `load` opens a folder, and what it returns generates text or encodes it.

Never here: building models, knowledge of a model family, torch outside of torch_*.py. `generate` asks only for a
`Decoder`, so that backends share it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ..cpu import slow_blocks
from .folder import TORCH, Facts, read_facts
from .trust import require_trust

if TYPE_CHECKING:
    from .core.generate import Generator
    from .core.protocols import Decoder
    from .ort.decoder import OrtDecoder
    from .ort.encoder import Encoder

__all__ = ["load"]

_log = logging.getLogger("weft.runtime")


def load(
    folder: str | Path, device: str = "auto", threads: int | None = None, *, trust: bool = False
) -> Generator | Encoder:
    """Open a compiled folder: an `Encoder` for an encoder, else a `Generator`, as its weft.json says.

    A folder of onnxruntime-genai's model builder opens as well, by its genai_config.json. `device` is "auto", "cpu" or
    "cuda", `threads` the number of CPU threads; see `session.open_session`. A folder of target torch is Python code,
    which runs when it is opened: only with `trust`.
    Raises WeftError when the folder, a file in it or the device cannot be used, or `trust` is needed.
    """
    facts = read_facts(folder)
    if facts.keeps_blocks and facts.target == "ort-cpu" and (slow := slow_blocks(facts.target)):
        _log.warning("%s", slow)
    from .torch import folder as torch_folder

    torch = facts.target == TORCH
    if torch:
        require_trust(trust, f"{folder} is compiled for PyTorch: its model.py is code that this would run")
    if facts.kind == "encoder":
        return (torch_folder.encoder if torch else _encoder)(facts, device, threads)
    from .core.generate import Generator
    from .core.sampling import Forced

    decoder: Decoder = (torch_folder.decoder if torch else _decoder)(facts, device, threads)
    return Generator(decoder, stop_ids=facts.eos, folder=facts.folder, forced=Forced(*facts.forced))


def _encoder(facts: Facts, device: str, threads: int | None) -> Encoder:
    from .ort.encoder import OrtEncoder
    from .ort.session import open_session

    return OrtEncoder(
        open_session(facts.model, device=device, threads=threads, target=facts.target),  # no graphs: shapes vary
        vocab=facts.vocab,
        max_length=facts.max_length,
        folder=facts.folder,
        pooling=facts.pooling,
        normalize=facts.normalize,
        compares=facts.compares,
    )


def _decoder(facts: Facts, device: str, threads: int | None) -> OrtDecoder:
    from .ort.decoder import OrtDecoder
    from .ort.session import open_session

    session = open_session(facts.model, device=device, threads=threads, target=facts.target, graphs=True)
    sources = None
    if facts.kind == "encoder-decoder":
        from .ort.cross_attention import SourceEncoder

        encoder = open_session(facts.encoder, device=device, threads=threads, target=facts.target)
        sources = SourceEncoder(encoder, facts.start, facts.max_source, str(facts.encoder), facts.compares)
    return OrtDecoder(
        session,
        vocab=facts.vocab,
        max_length=facts.max_length,
        head_dim=facts.head_dim,
        name=str(facts.model),
        carried=facts.carried,
        rolling=facts.rolling,
        compares=facts.compares,
        sources=sources,
    )
