"""Arguments that a forward receives in kwargs: the cache under its newer name, and arguments of attention."""

from __future__ import annotations

from typing import Any

from transformers import Cache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_outputs import BaseModelOutputWithPast

PAGES = () if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else PagedAttentionCache  # read by attention
PASSED = {  # objects that other functions read, or that have no meaning here
    *("attention_instances", "forward_batch"),  # vLLM and SGLang, to their attention functions
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),  # flash attention
    *("read_index", "write_index", "block_table", "logits_indices", "logits_processor_args"),  # generate_batch
    *("num_items_in_batch", "shift_labels", "output_hidden_states", "token_type_ids", "kwargs"),
}


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Raise a TypeError that names the tensors, caches and other objects in `kwargs` that nothing reads."""
    read = (bool, int, float, str, type(None), PAGES)
    given = kwargs | kwargs.get("kwargs", {})  # as transformers calls stages of a pipeline
    unread = [name for name, value in given.items() if name not in PASSED and not isinstance(value, read)]
    if unread:
        raise TypeError(f"the model has no argument {', '.join(unread)}: leave it out")


def get_cache(past_key_values: Any, kwargs: dict[str, Any]) -> Any:
    """Return `past_key_values` or kwargs["cache"] (its name from transformers 5.24 on), which is removed. A paged cache
    that earlier versions pass to attention by that name stays. Raise TypeError for two caches, or for other objects."""
    cache = None if isinstance(kwargs.get("cache"), PAGES) else kwargs.pop("cache", None)
    if cache is not None and past_key_values is not None:
        raise TypeError("give one cache, as past_key_values or as cache")
    cache = past_key_values if cache is None else cache
    if not isinstance(cache, (Cache, PagedAttentionCache, type(None))):
        raise TypeError(f"past_key_values must be a Cache of transformers, not a {type(cache).__name__}")
    return cache
