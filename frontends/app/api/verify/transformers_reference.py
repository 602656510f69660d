"""Hugging Face folders run by transformers, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError


def load_transformers(folder: Path, kind: str, option: str, own_kind: bool = False) -> Any:
    """Return the model in `folder` as the class `kind` of transformers, or with `own_kind` as the first class that its
    config names, if transformers has it; quantized weights are dequantized.

    Raises:
        WeftError: if transformers is missing (the message calls its user `option`) or cannot load the folder.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise WeftError(f"{option} needs transformers and torch ({error}): install weft[hf,torch]") from error
    if not (folder / "config.json").is_file():
        raise WeftError(f"{folder} has no config.json, so it is not a Hugging Face folder")
    quiet: Any = transformers.utils.logging  # partly typed
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder, **local)
        model = getattr(transformers, kind)
        if own_kind and config.architectures:
            model = getattr(transformers, config.architectures[0], model)
        if quantized := getattr(config, "quantization_config", None):
            quantized["dequantize"] = True  # as in the import
        options = {"config": config, "dtype": torch.float32, "attn_implementation": "eager", "use_safetensors": True}
        return model.from_pretrained(folder, **options, **local).eval()
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise WeftError(f"transformers cannot load {folder}: {error}") from error
