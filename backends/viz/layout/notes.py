"""Captions for values that a part reads or produces without a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..model.outline import PicturePart

PAST = "past"  # prefix of inputs with caches and states of earlier tokens


def write_captions(
    part: PicturePart, read: Iterable[str], layer_outputs: Iterable[str], results: Iterable[str]
) -> Iterator[str]:
    """Yield at most two captions of `part`, for values without a line: "with …" lists the operands in `read`; "gives …"
    lists the model outputs in `layer_outputs` and then the values in `results`, which other parts read."""
    names = list(dict.fromkeys(abbreviate_value(name, part.path, name in part.shared) for name in read))
    past = [name.removeprefix(f"{PAST} ") for name in names if name.startswith(f"{PAST} ")]
    current = [name for name in names if not name.startswith(f"{PAST} ")]
    if past:
        current.append(f"{PAST} {', '.join(past)}")
    if current:
        yield f"with {', '.join(current)}"
    outputs = [drop_number(name) for name in layer_outputs]
    if outputs:
        stem = outputs[0].partition(" ")[0]
        outputs = [f"{stem} {', '.join(name.removeprefix(f'{stem} ') for name in outputs)}"]
    if outputs := [*outputs, *dict.fromkeys(abbreviate_value(name, part.path) for name in results)]:
        yield f"gives {', '.join(outputs)}"


def abbreviate_value(value: str, path: str, shared: bool = False) -> str:
    """Return a short name of `value` for a caption of the part at `path`, without the scopes common to both names.

    "layers.0.attn.k" in "layers.0.attn": "k"
    "layers.0.attn.k" in "layers.0": "attn output"
    "encoder.norm" in "decoder.layers.0": "encoder output"
    "layers.0.mlp.down" in "layers.1": "mlp of the layer before"; if `shared` (all layers read it) "mlp of layer 0"
    "past_key_values.3.key" anywhere: "past key"
    """
    if value.startswith(PAST):
        return drop_number(value)
    inner, here = value.split("."), path.split(".")
    while len(inner) > 1 and here and inner[0] == here[0]:
        inner, here = inner[1:], here[1:]
    if inner[0].isdigit() and len(inner) > 1:
        before = not shared and here[:1] and here[0].isdigit() and int(here[0]) == int(inner[0]) + 1
        return f"{inner[1]} of {'the layer before' if before else f'layer {inner[0]}'}"
    words = [word for word in inner if not word.isdigit()]
    return words[0] if len(words) < 2 else f"{words[0]} output"


def drop_number(name: str) -> str:
    """Return the first and last word of `name` that are not digits ("past key" for "past_key_values.3.key"), or `name`
    if it has fewer than two words."""
    words = [word for word in name.replace("_", ".").split(".") if word and not word.isdigit()]
    return f"{words[0]} {words[-1]}" if len(words) > 1 else name
