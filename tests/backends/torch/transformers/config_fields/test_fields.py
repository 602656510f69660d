"""Config fields: one name for each role and value."""

from __future__ import annotations

from weft.backends.torch.transformers.config_fields.fields import Fields
from weft.ir.types.sizes import sym


def test_equal_values_share_a_field_and_others_get_a_prefix_or_number() -> None:
    fields = Fields()
    assert [fields.choose_name("head_dim", n, kind) for n, kind in ((8, ""), (8, "local"), (4, "local"), (4, ""))] == [
        "head_dim", "head_dim", "local_head_dim", "head_dim_2",
    ]  # fmt: skip
    assert fields.choose_name("head_dim", 2) == "head_dim_3"
    assert fields.values == {"head_dim": 8, "local_head_dim": 4, "head_dim_2": 4, "head_dim_3": 2}


def test_prefix_is_not_repeated() -> None:
    fields = Fields({"rms_norm_eps": 1e-6})
    assert fields.choose_name("rms_norm_eps", 1e-5, "rms_norm") == "rms_norm_eps_2"


def test_fields_of_the_encoder_have_its_prefix() -> None:
    fields = Fields({"hidden_size": 32}, side="encoder")
    assert fields.choose_name("hidden_size", 32) == "hidden_size"
    assert fields.choose_name("hidden_size", 16) == "encoder_hidden_size"
    fields.side = "decoder"  # transformers reads decoder_x as x
    assert fields.choose_name("hidden_size", 8) == "hidden_size_2"


def test_sizes_are_symbols() -> None:
    assert Fields().choose_size("hidden_size", 32) == sym("hidden_size")
