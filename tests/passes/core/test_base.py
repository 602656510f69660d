"""Passes as classes: names, arguments, documentation."""

from __future__ import annotations

import inspect

import pytest

from weft.passes import Pass, all_passes, lookup


@pytest.mark.parametrize("cls", all_passes().values(), ids=list(all_passes()))
def test_every_pass_is_documented_and_checked(cls: type[Pass]) -> None:
    assert cls.__doc__ and len(cls.doc()) > 40
    assert cls.effect in ("exact", "conditional", "lossy", "changing")
    assert (cls.check is Pass.check) == (cls.effect == "exact")
    assert cls.run is not Pass.run and lookup(cls.name) is cls
    assert inspect.signature(cls).parameters.keys() == {a.name for a in cls.arguments()}
    for argument in cls.arguments():
        assert argument.type_text and (argument.required or argument.check(argument.default) == argument.default)
