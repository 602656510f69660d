"""The inputs of encoders in encoder-decoders: sources of token ids, or of sound as arrays of floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from ...folder_facts import Sound
from ..arrays import Floats
from .tokenizer import is_sound, pad_rows

IDS, MASK = "encoder_input_ids", "encoder_attention_mask"


def check_sound(sound: Sound, prompt: object) -> Floats:
    """Return the sound `prompt` as float32. Raises WeftError unless it is a float array of the shape of `sound`."""
    if not is_sound(prompt):
        raise WeftError(f"a prompt is {quote_prompt(prompt)}, but the model takes sound: an array of floats, {sound}")
    length = prompt.shape[-1]
    fits = prompt.shape[:-1] == (() if sound.bins is None else (sound.bins,))
    if not fits or length == 0 or sound.length not in (None, length):
        raise WeftError(f"a prompt is {quote_prompt(prompt)}, but the model takes {sound}")
    return prompt.astype(np.float32)


def quote_prompt(prompt: object) -> str:
    """Return a description of `prompt` for errors: the shape of an array, else the start of its repr."""
    return f"an array {list(prompt.shape)}" if isinstance(prompt, np.ndarray) else f"{prompt!r:.60}"


def measure_prompt(prompt: Sequence[int] | Floats) -> int:
    """Return the length of a prompt: its number of tokens, or of samples or frames if it is a sound."""
    return prompt.shape[-1] if isinstance(prompt, np.ndarray) else len(prompt)


def build_encoder_inputs(sources: Sequence[Any], sound: Sound | None) -> dict[str, NDArray[Any]]:
    """Return a dict with two encoder inputs, keyed by name: the batch of `sources`, right-padded, and its mask [batch,
    length] (False: padding). Without `sound`, sources are token ids."""
    if sound is None:
        ids, mask = pad_rows(sources)
        return {IDS: ids, MASK: mask}
    lengths = np.array([measure_prompt(source) for source in sources])
    batch = np.zeros((len(sources), *sources[0].shape[:-1], int(lengths.max())), np.float32)
    for row, source in zip(batch, sources, strict=True):
        row[..., : measure_prompt(source)] = source
    return {sound.input: batch, MASK: np.arange(batch.shape[-1]) < lengths[:, None]}
