"""Attributes of the classes of a decode step."""

from __future__ import annotations

from weft.backends.torch.codegen.structure import Method
from weft.backends.torch.decode.step_members import name_attributes, write_constructor
from weft.backends.torch.program.statements import ParamRef, Submodule


def build_method(*members: ParamRef | Submodule, path: str = "") -> Method:
    method = Method(path, [])
    method.members.update({m.path: m for m in members})
    return method


def test_attributes_are_short_unless_two_would_be_equal() -> None:
    names = name_attributes(
        build_method(
            ParamRef("attn.q.weight", (2, 2)),
            Submodule("attn.q.norm", "Norm()"),
            Submodule("mlp.module", "{0}"),
            Submodule("angles.table1", "torch.zeros(1)"),
        )
    )
    assert sorted(names.values()) == ["angles", "attn_q", "attn_q_norm", "mlp"]
    assert names["mlp.module"] == "mlp"


def test_attributes_leave_out_the_path_of_their_class() -> None:
    names = name_attributes(build_method(ParamRef("layers.0.attn.o.weight", (2, 2)), path="layers.0"))
    assert names == {"layers.0.attn.o.weight": "attn_o"}


def test_constructor_reads_the_modules_of_the_model() -> None:
    method = build_method(ParamRef("head.weight", (2, 2)), Submodule("attn.qkv_weight", "pack({0}.q, {0}.k, {0}.v)"))
    assert sorted(write_constructor(method, {})) == [
        "self.attn_qkv = pack(module.attn.q, module.attn.k, module.attn.v)",
        "self.head = module.head.weight",
    ]
    assert write_constructor(build_method(), {}) == ["pass"]


def test_constructor_builds_one_list_of_layers() -> None:
    method = build_method()
    method.modules.update(dict.fromkeys(("layers.0", "layers.1")))
    assert write_constructor(method, {"layers.0": "Block", "layers.1": "Block"}) == [
        "self.layers = [Block(layer) for layer in module.layers]"
    ]
    assert write_constructor(method, {"layers.0": "Block", "layers.1": "Local"}) == [
        "self.layers = [kind(layer) for kind, layer in zip([Block, Local], module.layers)]"
    ]
