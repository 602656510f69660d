"""Runtime for compiled models: `load` opens a folder and returns a `Generator` or an `EncoderModel`.

`core` generates tokens with any `CachedDecoder`; `ort` and `torch` implement it, `batching` decodes several answers
together, `text` has the tokenizer and chat templates. Never here: building models, knowledge of a model family, PyTorch
outside of `torch`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..target import TARGETS
from .compiled_folder import read_facts
from .core.sampler import check_count
from .trust import require_trust

if TYPE_CHECKING:
    from .core.generation import Generator
    from .ort.ort_encoder import EncoderModel

__all__ = ["load"]


def load(
    folder: str | Path,
    device: str = "auto",
    threads: int | None = None,
    *,
    trust: bool = False,
    experts_on_device: int | None = None,
) -> Generator | EncoderModel:
    """Open a compiled folder; return an `EncoderModel` if its weft.json describes an encoder, else a `Generator`.

    A folder of onnxruntime-genai's model builder also opens, by its genai_config.json. `device` is "auto", "cpu" or
    "cuda"; `threads` is the number of CPU threads of one operator (None: the runtime's default). A folder of target
    torch is Python code that runs when it is opened, so it requires `trust`. With `experts_on_device` = n, only the n
    most recently used experts of each mixture are on the device, and the host stores all; None puts all on the device.
    Raises WeftError if the folder, a file in it, the device or an argument cannot be used, or `trust` is missing.
    """
    facts = read_facts(folder)
    target = TARGETS[facts.target]
    if target.is_code:
        require_trust(
            trust, f"{folder} is compiled for {target.runtime}: its {facts.model.name} is code that this would run"
        )
    if experts_on_device is None:
        model = target.open(facts, device, threads)
    else:
        check_count("experts_on_device", experts_on_device)
        model = target.open_offloaded(facts, device, threads, experts_on_device)
    if facts.kind == "encoder":
        return cast("EncoderModel", model)
    from .core.generation import Generator
    from .core.sampler import TokenRules

    options: dict[str, Any] = {"stop_ids": facts.eos, "folder": facts.folder, "defaults": facts.defaults}
    options["forced"] = TokenRules(**facts.forced)
    generator = Generator(model, **options)
    for name, path in facts.adapters.items():
        generator.adapters[name] = Generator(model.select_adapter(name, path), **options)
        generator.adapters[name].prefixes = generator.prefixes
    return generator
