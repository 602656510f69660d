"""Parts of a source that its graph has not, each by a name, with the reason.

Whatever is in a source is used, means nothing for what the model computes, or is left out. What is left out is told
when it happens, recorded in weft.json and shown by inspect; where the library of the source would compute other
numbers with it, nothing is compiled or exported until ``--without NAME`` accepts that.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import Record

from .config_keys import Unread


@dataclass(frozen=True)
class LeftOut:
    """A part of a source that its graph has not.

    `kind` is tensors, key, file, head, projector, or vision or audio tower; `name` what messages and ``--without`` call
    it; `detail` its value, or what belongs to it. `changes`: the source's own library computes other numbers with it.
    """

    kind: str
    name: str
    detail: str = ""
    changes: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + (f" ({self.detail})" if self.detail else "")

    @classmethod
    def read(cls, entry: Record) -> LeftOut:
        """The part that an entry of a manifest describes."""
        return cls(entry.text("kind"), entry.text("name"), entry.text("detail", ""), entry.flag("changes", False))

    def record(self) -> dict[str, Any]:
        """The entry of a manifest."""
        return {"kind": self.kind, "name": self.name, "detail": self.detail, "changes": self.changes}


# Checkpoint tensors that a table knows and no graph reads, by the reason.
_REASONS = {
    "of the other encoder of a pair": r"(vision|text)_model\..*|(visual|text)_projection\..*|logit_(scale|bias)",
    "a buffer that the graph computes": r".*(inv_freq|position_ids|masked_bias|attn\.bias|attention\.bias|rot_embd"
    r"|rope_f\w+\.weight|\.version)",
    "of further layers, which predict several tokens ahead": r".*(mtp|nextn|layers\.\d+)\..*|blk\..*",
    "a copy of the embedding": r".*(lm_head|embed_out|output_projection|proj_out|(^|\.)head|embed_tokens)\.weight",
    "of training": r".*(mask_token|masked_spec_embed|quantizer\.|project_q\.|project_hid\.|generator_|discriminator).*",
}


def meaning_of_tensor(key: str) -> str:
    """Return why the tensor `key`, which a table declares to be of no use, is not read."""
    return next((reason for reason, names in _REASONS.items() if re.fullmatch(names, key)), "of another head")


def unread_tensors(unread: Sequence[str], read: Collection[str]) -> Iterator[LeftOut]:
    """Yield the modules that hold the tensors `unread` and none of those that are `read`, one entry for all layers."""
    parents = {key[:at] for key in read for at in _dots(key)}
    modules: dict[str, list[str]] = {}
    for key in unread:
        module = next((key[:at] for at in _dots(key) if key[:at] not in parents), key)
        modules.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "{i}", module), []).append(key)
    for module, keys in modules.items():
        yield LeftOut("tensors", module, "" if keys == [module] else several(keys))


def several(keys: Sequence[str]) -> str:
    """Return the first two of `keys`, and how many more there are."""
    return ", ".join(keys[:2]) + (f" and {len(keys) - 2} more" if len(keys) > 2 else "")


def unread_settings(unread: Iterable[Unread]) -> Iterator[LeftOut]:
    """Yield an entry for each key of a config that nothing reads."""
    for key in unread:
        why = f", overridden by {key.override}" if key.override else ""
        yield LeftOut("key", key.path, f"{key.value!r:.60}{why}")


def unread_entries(said: Mapping[str, Any], known: Collection[str], file: str) -> Iterator[LeftOut]:
    """Yield an entry for each key of `said`, the contents of `file`, that is not in `known` and not null."""
    for key, value in said.items():
        if value is not None and key not in known:
            yield LeftOut("key", f"{file}:{key}", f"{value!r:.60}")


def accept(source: str, parts: Sequence[LeftOut], without: Collection[str]) -> list[LeftOut]:
    """Check that all `parts` left out of `source` that change numbers are among `without`; return the others.

    Raises:
        WeftError: naming the first that is not, or a name in `without` that nothing left out has.
    """
    names = {part.name for part in parts}
    for name in without:
        if name not in names:
            listed = ", ".join(sorted(names)) or "nothing"
            raise WeftError(f"{source} has no part {name!r} that could be left out; what is left out: {listed}")
    for part in parts:
        if part.changes and part.name not in without:
            raise WeftError(
                f"{source}: {part} would be left out, which changes what the model computes; "
                f"--without {part.name} accepts that"
            )
    return [part for part in parts if part.name not in without]


def _dots(key: str) -> list[int]:
    """The positions of the dots in `key`: ends of the modules that it lies in."""
    return [match.start() for match in re.finditer(r"\.", key)]
