"""Arguments of a call that a model does not name: its cache by a newer name, and what attention functions read."""

from __future__ import annotations

from typing import Any

from transformers import Cache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_outputs import BaseModelOutputWithPast

# Before transformers 5.24 a cache is called past_key_values, and attention functions read pages from `kwargs`.
OLD_NAME = "past_key_values" in BaseModelOutputWithPast.__dataclass_fields__
PLAIN = (bool, int, float, str, type(None), *((PagedAttentionCache,) if OLD_NAME else ()))
PASSED = {
    *("attention_instances", "forward_batch"),  # vLLM and SGLang, to their attention functions
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),  # flash attention
    *("read_index", "write_index", "block_table", "logits_indices", "logits_processor_args"),  # generate_batch
    *("num_items_in_batch", "shift_labels"),  # the loss
    *("output_hidden_states", "token_type_ids"),  # read by a decorator; made by tokenizers for every model
}


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse tensors, caches and other objects that nothing reads.

    Raises:
        TypeError: naming them.
    """
    unread = [name for name, value in kwargs.items() if name not in PASSED and not isinstance(value, PLAIN)]
    if unread:
        raise TypeError(f"the model has no argument {', '.join(unread)}: leave it out")


def cache_of(past_key_values: Any, kwargs: dict[str, Any]) -> Any:
    """Return the cache of a call by either of its names, taken out of `kwargs` where it is called `cache`.

    Raises:
        TypeError: if there are two, or it is not one of transformers.
    """
    if not OLD_NAME or not isinstance(kwargs.get("cache"), PagedAttentionCache):
        cache = kwargs.pop("cache", None)
        if cache is not None and past_key_values is not None:
            raise TypeError("give one cache, as past_key_values or as cache")
        past_key_values = past_key_values if cache is None else cache
    if not isinstance(past_key_values, (Cache, PagedAttentionCache, type(None))):
        raise TypeError(f"past_key_values must be a Cache of transformers, not a {type(past_key_values).__name__}")
    return past_key_values
