"""Running compiled models: `load` opens a folder, and what it returns generates text or encodes it.

Never here: building models, knowledge of a model family, torch. `generate` asks only for a `Decoder`, so that another
backend can share it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .folder import read_facts

if TYPE_CHECKING:
    from .encoder import Encoder
    from .generate import Generator

__all__ = ["load"]


def load(folder: str | Path, device: str = "auto", threads: int | None = None) -> Generator | Encoder:
    """Open a compiled folder: an `Encoder` for an encoder, else a `Generator`, as its weft.json says.

    A folder of onnxruntime-genai's model builder opens as well, by its genai_config.json. `device` is "auto", "cpu" or
    "cuda", `threads` the number of CPU threads; see `session.open_session`.
    Raises WeftError when the folder, a file in it or the device cannot be used.
    """
    facts = read_facts(folder)
    from .session import open_session

    graphs = facts.kind != "encoder"  # an encoder's inputs have another shape each time
    session = open_session(facts.model, device=device, threads=threads, target=facts.target, graphs=graphs)
    if facts.kind == "encoder":
        from .encoder import Encoder

        return Encoder(
            session,
            vocab=facts.vocab,
            max_length=facts.max_length,
            folder=facts.folder,
            pooling=facts.pooling,
            normalize=facts.normalize,
            compares=facts.compares,
        )
    from .decoder import OrtDecoder
    from .generate import Generator
    from .sampling import Forced

    sources = None
    if facts.kind == "encoder-decoder":
        from .sources import SourceEncoder

        encoder = open_session(facts.encoder, device=device, threads=threads, target=facts.target)
        sources = SourceEncoder(encoder, facts.start, facts.max_source, str(facts.encoder), facts.compares)
    decoder = OrtDecoder(
        session,
        vocab=facts.vocab,
        max_length=facts.max_length,
        head_dim=facts.head_dim,
        name=str(facts.model),
        rolling=facts.rolling,
        compares=facts.compares,
        sources=sources,
    )
    return Generator(decoder, stop_ids=facts.eos, folder=facts.folder, forced=Forced(*facts.forced))
