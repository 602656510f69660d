"""Find unread parts of a Hugging Face folder: files, keys of generation_config.json, and vision and audio towers."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.backends.runtime.core.sampler import DEFAULTS

from ...models.config_keys import explain
from ...models.left_out import LeftOut, summarize

# Glob patterns of files that do not affect the outputs, by the reason.
_MEANINGLESS = {
    "for people": "*.md LICEN[CS]E* NOTICE* USE_POLICY* *.png *.jpg *.jpeg *.gif *.svg *.pdf",
    "lists of the weights": "model.safetensors.index.json",
    "of git and the hub": ".git* .cache .locks *.lock .DS_Store *.metadata",
    "of training": "training_args.bin trainer_state.json optimizer* scheduler* rng_state* *tfevents* runs "
    "*_results.json checkpoint-* trainer_log* training_loss* eval global_step* latest zero_to_fp32.py "
    "data_config.json train_script.py",
    "the same weights for other libraries": "*.bin *.bin.index.json *.h5 *.msgpack *.ot *.pth *.pt *.ckpt *.gguf "
    "*.onnx* onnx openvino coreml original *.mlpackage *.tflite consolidated* params.json",
    "weft's own": "provenance.json model.weft",
}
_PREPARES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "mel_filters.npz")
# Keys of generation_config.json: those that weft reads, patterns of those that never change a token, and values at
# which others have no effect.
_READ_KEYS = (
    *(f"{name}_token_id" for name in ("bos", "eos", "pad", "decoder_start", "forced_bos", "forced_eos")),
    *("suppress_tokens", "begin_suppress_tokens", "no_timestamps_token_id", "lang_to_id", "task_to_id", "language"),
    *("task", "forced_decoder_ids", "is_multilingual", "alignment_heads", "max_initial_timestamp_index"),
    *("do_sample", "max_new_tokens", *DEFAULTS),
)
_IDLE = ("transformers_version", "_from_model_config", "use_cache", "return_dict_in_generate", "max_length", "output_*")
_ONES = (
    "typical_p num_beams num_beam_groups encoder_repetition_penalty length_penalty num_return_sequences guidance_scale"
)
_ZEROS = (
    "early_stopping diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size min_length "
    "remove_invalid_values renormalize_logits epsilon_cutoff eta_cutoff"
)
_NEUTRAL = {**dict.fromkeys(_ONES.split(), 1), **dict.fromkeys(_ZEROS.split(), 0)}

# Patterns of the module names of encoders next to a language model, and of the config keys that configure them.
_TOWERS = {
    "projector": re.compile("project|connector|merger|aligner|neck|mlp1"),
    "audio tower": re.compile("audio|acoustic|semantic|speech"),
    "vision tower": re.compile("vis|image|video|vq"),
}
OF_TOWERS = re.compile(
    "vision|visual|image|video|audio|acoustic|semantic|perceiver|projector|patch|spatial|merge|mm_|vq_|downsample"
    "|scale_factor|num_channels|insert_layer_id|^(bo|eo)[ia]_|token_classification_bias"
)


def find_unread_files(folder: Path, files: tuple[Path, ...]) -> Iterator[LeftOut]:
    """Yield the files and folders in `folder` that may affect the outputs, except those in `files`, which are read."""
    names_read = {file.relative_to(folder).parts[0] for file in files if file.is_relative_to(folder)}
    for path in sorted(folder.iterdir()):
        if path.name in names_read or explain_file(path.name):
            continue
        name = path.name + ("/" if path.is_dir() else "")
        if path.suffix == ".py":
            yield LeftOut("file", name, "code is not run")
        elif path.name in _PREPARES:
            yield LeftOut("file", name, "inputs are not preprocessed: use the model's own library for it")
        else:
            yield LeftOut("file", name, "not read")


def explain_file(name: str) -> str:
    """Return the reason why the file `name` does not affect the outputs; "" if it may."""
    patterns = ((pattern, reason) for reason, names in _MEANINGLESS.items() for pattern in names.split())
    return next((reason for pattern, reason in patterns if fnmatch.fnmatch(name, pattern)), "")


def find_unread_generation(generation: Mapping[str, Any]) -> Iterator[LeftOut]:
    """Yield the keys of `generation` (generation_config.json) that weft ignores although they may change the tokens."""
    for key, value in generation.items():
        idle = any(fnmatch.fnmatch(key, name) for name in _IDLE)
        if key not in _READ_KEYS and not idle and value not in (None, [], _NEUTRAL.get(key)):
            yield LeftOut("key", f"generation_config.json:{key}", f"{value!r:.60}")


def find_unread_towers(modules: Collection[str], keys: Sequence[str]) -> Iterator[LeftOut]:
    """Yield a `LeftOut` for each of the unread `modules`; its detail summarizes the module's tensors among `keys`, the
    ignored ones. Vision and audio towers and projectors do not change the logits of text-only input."""
    for module in sorted(modules):
        kind = next((kind for kind, names in _TOWERS.items() if names.search(module)), "")
        detail = summarize([key for key in keys if is_inside(key, [module])])
        yield LeftOut(kind or "tensors", module, detail + ("; not needed for text input" if kind else ""))


def is_inside(key: str, modules: Collection[str]) -> bool:
    """Return whether the tensor or module name `key` is in `modules` or starts with one of them and a dot."""
    return any(key == module or key.startswith(f"{module}.") for module in modules)


def find_unread_outer(config: Mapping[str, Any], read: Collection[str]) -> Iterator[LeftOut]:
    """Yield a part for each key at the top level of a composite `config`, such as LLaVA's, that nothing reads. Skip
    keys in `read` (which the language model uses), keys of vision and audio towers, and keys without effect."""
    for key, value in config.items():
        if value is not None and key not in ("text_config", *read) and not explain(key) and not OF_TOWERS.search(key):
            yield LeftOut("key", key, f"{value!r:.60}")
