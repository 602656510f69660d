"""Names of classes: those of the model, and none that transformers or an engine has."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from weft.backends.torch.transformers.model_names import derive_class_name, derive_stem


@pytest.mark.parametrize(
    ("name", "expected", "stem"),
    [
        ("local_global", "LocalGlobal", "local_global"),
        ("my-model-7b", "MyModel", "my_model"),
        ("llama3.1-8b", "Llama31", "llama31"),
        ("qwen3-30b-a3b", "Qwen3Weft", "qwen3_weft"),
        ("mamba-1.4b", "Ssm", "ssm"),
        ("hybrid_mamba", "HybridSsm", "hybrid_ssm"),
        ("orion", "OrionWeft", "orion_weft"),  # only engines have it
        ("2-layers", "Weft2Layers", "weft2_layers"),
        ("model", "Weft", "weft"),
    ],
)
def test_class_is_named_after_the_model(name: str, expected: str, stem: str) -> None:
    assert (derive_class_name(name), derive_stem(expected)) == (expected, stem)


def test_no_class_or_type_is_that_of_transformers() -> None:
    """Transformers loads its own code for a type that it has, unless the folder's is trusted."""
    names = [derive_class_name(kind) for kind in CONFIG_MAPPING_NAMES]
    assert not {derive_stem(name) for name in names} & CONFIG_MAPPING_NAMES.keys()
    assert not {f"{name}Config".lower() for name in names} & {kind.lower() for kind in CONFIG_MAPPING_NAMES.values()}
