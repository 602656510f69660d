"""Let griffe, which reads the stubs for the site, see functions that have overloads only, by the first of them."""

from __future__ import annotations

from typing import Any

import griffe


class FirstOverload(griffe.Extension):
    """In a stub no implementation follows the overloads, and griffe would leave the function out."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        for name, overloads in mod.overloads.items():
            if name not in mod.members:
                mod.set_member(name, overloads[0])
