"""Keys of config.json: select one value if a setting is spelled twice, and find the keys that nothing reads.

The choice between spellings follows transformers. config_keys.json describes its config class of every model type, and
is written by ``python -m tests.frontends.models.config_facts``: `overrides` maps a key to the key that it replaces if a
config has both (of two `ordered` keys, the later one in the file wins), `rope` states how rope_scaling changes
rope_parameters, `original` whether the config's original_max_position_embeddings replaces that of the RoPE settings,
and `defaults` are the values at which an unread key has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from weft.ir.errors import WeftError
from weft.ir.storage.documents import read_json

FACTS = "config_keys.json"
_ROPE, _SCALING = "rope_parameters", "rope_scaling"
_FLAT, _LATEST = "replaces", "replaces even if empty"  # the effect of rope_scaling on rope_parameters
_ORIGINAL, _ORIGINAL_KINDS = "original_max_position_embeddings", ("llama3", "yarn", "longrope")
_ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", _ORIGINAL, "attention_factor", "mscale"),
    *("mscale_all_dim", "beta_fast", "beta_slow", "truncate", "short_factor", "long_factor", "short_mscale"),
    *("llama_4_scaling_beta", "alpha", "long_mscale", "low_freq_factor", "high_freq_factor", "mrope_section"),
    *("mrope_interleaved", "finetuned"),
)
# Regular expressions for keys that do not affect the outputs, by the reason.
MEANINGLESS = {
    "names the model or its writer": "_name_or_path name_or_path model_type architectures transformers_version "
    "_commit_hash torchscript use_bfloat16 tokenizer_class auto_map language languages vocab_list pruned_heads "
    "_attn_implementation _attn_implementation_internal attn_implementation _experts_implementation_internal "
    "experts_implementation gradient_checkpointing onnx_export task_specific_params finetuning_task _weft.* "
    "base_model_tp_plan base_model_pp_plan adapters",
    "is a dtype, which --dtype chooses": "dtype torch_dtype",
    "is read with the tensors": "quantization_config compression_config",
    "is a token, which generation looks up": r"\w+_token_id image_token_index video_token_index tokens_to_ignore",
    "counts in training only": r"\w*dropout\w* \w*drop_rate \w*pdrop \w*layerdrop init_std initializer_\w+ "
    r"embed_init_std embedding_initializer_range \w+_initializer_range \w+_variance_scale router_jitter_noise "
    r"input_jitter_noise \w+_loss_coef aux_loss_\w+ aux_loss_alpha z_loss_\w+ seq_aux drop_path_rate use_mems_train "
    r"time_step_min time_step_max time_step_floor time_step_init_scheme time_step_scale rescale_prenorm_residual "
    r"linear_dt_\w+ linear_a_log_\w+ inv_coeff_init_option ctc_\w+ mask_\w+_prob mask_\w+_length mask_\w+_min_masks "
    r"apply_spec_augment contrastive_logits_temperature diversity_loss_weight feat_quantizer_\w+ num_negatives "
    r"\w*codevector\w* sparse_pred_ignore_index sparse_prediction lambda_std_dev mask_ratio norm_pix_loss "
    r"ep_size layer_norm_training init_method init_device use_cutlass_fused_moe mtp_\w+ num_nextn_predict_layers "
    "moe_loss_weight n_mtp_layers num_mtp_layers use_mtp",
    "asks for more outputs": r"output_\w+ return_dict return_dict_in_generate return_last_states num_logits_to_keep "
    "use_return_dict",
    "chooses between ways to compute the same": r"use_cache chunk_size_feed_forward pretraining_tp use_mamba_kernels "
    r"use_associative_scan use_mambapy use_mem_eff_path \w*chunk_size residual_in_fp32 slow_but_exact "
    r"reorder_and_upcast_attn attention_softmax_in_fp32 scale_attention_softmax_in_fp32 \w+_kernel \w+_kernel_dtype "
    r"inference_state_dtype max_inference_chunksize norm_reduction_force_float32 mamba_ssm_cache_dtype router_dtype "
    r"moe_shared_expert_overlap enable_moe_fp32_combine use_tpu_fourier_optimizations tpu_short_seq_length "
    r"deterministic_flash_attn attn_config.attn_impl attn_config.qk_gn block_size median_filter_width "
    r"initializer_cutoff_factor reference_compile repad_logits_with_grad use_flash_attn fused_mlp fused_bias_fc "
    r"fused_dropout_add_ln flash_attn use_xformers use_memory_efficient_attention unpad_inputs use_sdpa",
    "is a setting of a separate head or tower": r"id2label label2id num_labels problem_type classifier_\w+ "
    r"summary_\w+ qa_\w+ seq_classif_\w+ start_n_top end_n_top pooler_output_size projection_dim projection_size "
    r"esmfold_config out_features out_indices stage_names reshape_hidden_states encoder_stride decoder_bias "
    r"tdnn_\w+ xvector_output_dim num_adapter_layers adapter_kernel_size adapter_stride output_hidden_size "
    "use_weighted_layer_sum vision_use_head use_mask_token add_pooling_layer sbert_ce_default_activation_function "
    "sentence_transformers",
    "is a default of generation, which generation_config.json has": "max_length min_length do_sample early_stopping "
    "num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens forced_decoder_ids max_new_tokens",
    "follows from other keys": "qk_head_dim n_ctx kv_channels is_encoder_decoder is_decoder tie_word_embeddings",
}
_REASONS = [(reason, re.compile("|".join(names.split()))) for reason, names in MEANINGLESS.items()]


class Unread(NamedTuple):
    """A config key that nothing reads: its dotted `path`, its `value`, and the key=value that overrides it, or ""."""

    path: str
    value: Any
    override: str = ""

    def __str__(self) -> str:
        return f"{self.path}={self.value!r:.60}" + (f" (overridden by {self.override})" if self.override else "")


class RecordingConfig(dict[str, Any]):
    """A config that records in `read` the dotted paths of the keys that are accessed, also in nested dicts."""

    def __init__(self, config: Mapping[str, Any], read: set[str] | None = None, prefix: str = "") -> None:
        super().__init__(config)
        self.read: set[str] = set() if read is None else read
        self._prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __getitem__(self, key: str) -> Any:
        self.read.add(path := f"{self._prefix}{key}")
        value = super().__getitem__(key)
        return RecordingConfig(value, self.read, f"{path}.") if type(value) is dict else value

    def values(self) -> Any:
        return [value for _, value in self.items()]

    def items(self) -> Any:
        """Return the items. In a nested config this records all keys as read, at the top level none."""
        return [(key, self[key]) for key in self] if self._prefix else super().items()


@cache
def load_facts() -> Mapping[str, Mapping[str, Any]]:
    """Return the contents of config_keys.json (see the top of this file): records, keyed by model type."""
    by_type: dict[str, dict[str, Any]] = read_json(Path(__file__).with_name(FACTS))
    return by_type


def explain(path: str, config: Mapping[str, Any] | None = None) -> str:
    """Return the reason why the key at the dotted `path` does not affect the outputs; "" if it may. With `config`, a
    `path` that is not at its top level is also looked up by its last part alone."""
    spellings = (path,) if config is None or path in config else (path, path.rpartition(".")[2])
    return next((reason for reason, names in _REASONS if any(map(names.fullmatch, spellings))), "")


def normalize_config(config: Mapping[str, Any], model_type: str) -> Mapping[str, Any]:
    """Return `config` in which both spellings of a setting have the value that transformers uses.
    rope_scaling is merged into rope_parameters. The result is `config` itself if nothing changes."""
    type_facts = _find_facts(config, model_type)
    # transformers assigns an overriding key last, so it wins whatever their order in the file, unless it is `ordered`.
    ordered, places = type_facts.get("ordered", ()), {key: i for i, key in enumerate(config)}
    overrides = {
        replaced: config[key]
        for key, replaced in type_facts.get("overrides", {}).items()
        if key in config and (key not in ordered or places.get(replaced, -1) < places[key])
    }
    result = {**config, **overrides}
    if "rope" in type_facts and (_ROPE in config or config.get(_SCALING)):
        result[_ROPE] = _merge_rope(result, type_facts["rope"], type_facts.get("original", False))
        result.pop(_SCALING, None)
    return result if result != config else config


def _merge_rope(config: dict[str, Any], form: str, original: bool) -> Any:
    """Return the RoPE settings of `config`, merging rope_scaling and rope_parameters as transformers does.

    `form` and `original` are the entries `rope` and `original` of config_keys.json. If `form` is `_FLAT`, rope_scaling
    replaces rope_parameters unless it is empty; if `_LATEST`, also if it is empty. Else `form` lists layer types,
    rope_scaling is merged into the settings of each, and settings that are not by layer type are ignored. If `config`
    has original_max_position_embeddings, RoPE settings of types llama3, yarn and longrope get this key too: with
    `original` the value in `config`, else the one they have, else max_position_embeddings.
    """
    parameters, scaling = config.get(_ROPE), config.get(_SCALING)
    if form in (_FLAT, _LATEST):
        rope = scaling if scaling or (form == _LATEST and _SCALING in config) else parameters
    else:
        by_type = isinstance(parameters, Mapping) and any(isinstance(v, Mapping) for v in parameters.values())
        layered: Mapping[str, Any] = parameters if by_type and parameters else {}
        if any(not isinstance(layered.get(kind) or {}, Mapping) for kind in form.split()):
            return parameters  # the family's table refuses it
        shared = dict(scaling) if isinstance(scaling, Mapping) else {}
        if not layered and not shared:
            return None
        plain = {"rope_type": "default"}
        rope = {**layered, **{kind: plain | (layered.get(kind) or {}) | shared for kind in form.split()}}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
    if kind in _ORIGINAL_KINDS and _ORIGINAL in config:
        length = next((config[key] for key in ("max_position_embeddings", "max_seq_len") if key in config), None)
        original_length = {_ORIGINAL: config[_ORIGINAL]} if original else {}
        rope = {_ORIGINAL: length, **(rope or {}), **original_length}
    return rope


def find_unread_keys(
    config: Mapping[str, Any], model_type: str, inert: Collection[str], read: Callable[[Mapping[str, Any]], object]
) -> Iterator[Unread]:
    """Yield the keys of `config` that `read`, a function from a config to its settings, ignores.

    Not yielded are keys in `inert` or with a reason in `explain`, null values and transformers' defaults. A key counts
    as read if (a) `read` accesses it, (b) `read` would access it if one other key were absent or one flag inverted
    (such as use_sliding_window=false, which disables the window), or (c) another value of the key changes the settings.
    Overridden spellings of a setting and unknown keys of RoPE settings are also yielded.
    """
    type_facts, resolved = _find_facts(config, model_type), normalize_config(config, model_type)
    for key, replaced in type_facts.get("overrides", {}).items():
        if key in config and config.get(replaced, config[key]) not in (config[key], None):
            loser, winner = (replaced, key) if resolved[replaced] == config[key] else (key, replaced)
            yield Unread(loser, config[loser], f"{winner}={config[winner]!r}")
    recorded, defaults = RecordingConfig(resolved), type_facts.get("defaults", {})
    settings = read(recorded)
    for path, value in iter_leaves(resolved, None):
        *outer, last = path.split(".")
        if value is not None and last not in _ROPE_KEYS and not {_ROPE, _SCALING}.isdisjoint(outer):
            yield Unread(path, value)
    if "rope" in type_facts and config.get(_ROPE) and resolved.get(_ROPE) != config[_ROPE]:
        yield Unread(_ROPE, config[_ROPE], _SCALING if config.get(_SCALING) else "settings by layer type")
    rotary = {_ROPE, _SCALING, *_ROPE_TOP} if type_facts.get("rope") else set()
    skipped = recorded.read | set(inert) | type_facts.get("overrides", {}).keys() | rotary

    def is_unread(path: str, value: Any) -> bool:
        is_stated = value is not None and defaults.get(path, _ABSENT) != value
        return is_stated and path not in skipped and not explain(path, resolved)

    unused = {path: value for path, value in iter_leaves(resolved, recorded.read) if is_unread(path, value)}
    unused = {path: value for path, value in unused.items() if not _has_effect(resolved, path, value, read, settings)}
    if unused:
        for path, value in iter_leaves(resolved, recorded.read):
            for alternative in (_ABSENT,) if not isinstance(value, bool) else (_ABSENT, not value):
                variant = RecordingConfig(_set_value(resolved, path, alternative))
                try_read(read, variant)
                unused = {path: value for path, value in unused.items() if path not in variant.read}
    yield from (Unread(path, value) for path, value in unused.items())


def iter_leaves(config: Mapping[str, Any], read: Collection[str] | None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path, starting with `prefix`, and the value of each key of `config` and of its nested mappings.

    With `read`, nested mappings whose path is not in `read`, rope_parameters and rope_scaling are yielded as values.
    """
    for key, value in config.items():
        path = f"{prefix}{key}"  # keys of objects built in Python may be numbers
        if isinstance(value, Mapping) and value and (read is None or (path in read and key not in (_ROPE, _SCALING))):
            yield from iter_leaves(value, read, f"{path}.")
        else:
            yield path, value


_ABSENT = object()
_ROPE_TOP = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def _find_facts(config: Mapping[str, Any], model_type: str) -> Mapping[str, Any]:
    stated = config.get("model_type")
    return load_facts().get(stated if isinstance(stated, str) and stated in load_facts() else model_type, {})


def _has_effect(
    config: Mapping[str, Any], path: str, value: Any, read: Callable[[Mapping[str, Any]], object], settings: object
) -> bool:
    """Return whether the settings change, or `read` fails, if `value` at `path` of `config` changes or is absent."""
    alternatives = (_ABSENT, *_vary(value))
    return any(try_read(read, _set_value(config, path, alternative)) != settings for alternative in alternatives)


def _set_value(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    key, _, rest = (path, "", "") if path in config else path.partition(".")
    if rest:
        value = _set_value(config[key], rest, value)
    result = {**config, key: value}
    if value is _ABSENT:
        del result[key]
    return result


def _vary(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int | float):
        return (value + 1, value * 2)
    return (f"{value}?",) if isinstance(value, str) else ()


RULE_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)  # raised by invalid values in rules


def try_read(read: Callable[[Mapping[str, Any]], object], config: Mapping[str, Any]) -> object:
    """Return `read(config)`, or the error that it raises: a WeftError or one of `RULE_ERRORS`."""
    try:
        return read(config)
    except (WeftError, *RULE_ERRORS) as e:
        return e
