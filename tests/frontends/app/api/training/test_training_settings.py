"""Settings of a run: their ranges, their values for a model, and their plan."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import pytest

import weft
from weft import Attention, Block, Decoder, DistilSettings, GatedMLP, LearnedPositions, RMSNorm, TrainingSettings
from weft.frontends.app.api.initialization import SCHEMES
from weft.ir.errors import WeftError

MODEL = weft.load_source(
    Decoder(64, 32, 1, Block(Attention(4), GatedMLP(32), RMSNorm()), positions=LearnedPositions(64))
)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps is 0, but it must be at least 1"),
        ({"rate": float("nan")}, "rate is nan, but it must be a positive number"),
        ({"minutes": -1.0}, "minutes is -1.0"),
        ({"decay": -0.1}, "decay is -0.1, but it must be at least 0"),
        ({"schedule": "linear"}, "unknown schedule 'linear'; known are cosine, wsd, constant"),
        ({"init": "x"}, "unknown init 'x'"),
        ({"batch": 10, "accumulate": 3}, "a batch of 10 windows cannot be computed in 3 equal parts"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        TrainingSettings(**values)  # type: ignore[arg-type]


def test_settings_of_training_that_distillation_has_not_are_refused() -> None:
    with pytest.raises(WeftError, match=r"lora is a setting of weft\.train, without effect on a distillation"):
        DistilSettings(lora=2)
    with pytest.raises(WeftError, match="width is a setting"):
        DistilSettings(width=64)
    with pytest.raises(WeftError, match="rank is for train=lora"):
        DistilSettings(rank=4)
    assert DistilSettings(rank=4, train=("lora",)).rank == 4
    with pytest.raises(WeftError, match="layers is 1, but it is a share of the run"):
        DistilSettings(layers=1)


def test_initialization_has_the_schemes_that_settings_name() -> None:
    (init,) = (field for field in fields(TrainingSettings) if field.name == "init")
    assert init.metadata["choices"] == SCHEMES


def test_values_that_depend_on_the_model_are_filled_in() -> None:
    assert asdict(TrainingSettings().resolve(MODEL)) == asdict(TrainingSettings(steps=600, context=64, rate=2e-3))
    checkpoint = replace(MODEL, random_init=False)
    assert TrainingSettings(tokens=1000, batch=4, context=32).resolve(checkpoint).steps == 8
    assert TrainingSettings().resolve(checkpoint).rate == 1e-4
    with pytest.raises(WeftError, match="has 64 positions: choose a smaller one"):
        TrainingSettings(context=65).resolve(MODEL)


def test_plan_of_a_share_of_the_run() -> None:
    plan = TrainingSettings(steps=2000).resolve(MODEL).make_plan(0.5)
    assert (plan.steps, plan.warmup, plan.seconds) == (1000, 0.1, None)
    assert TrainingSettings(steps=4000, warmup=40).resolve(MODEL).make_plan().warmup == 0.01
    timed = TrainingSettings(minutes=10).resolve(MODEL).make_plan(0.2)
    assert timed.seconds == 120 and timed.steps > 1 << 30 and timed.warmup == 0.03


def test_settings_are_read_back() -> None:
    settings = TrainingSettings(steps=5, betas=(0.9, 0.99))
    values = asdict(settings) | {"betas": [0.9, 0.99]}  # as JSON has them
    assert TrainingSettings.read(values, "run.json") == settings
    with pytest.raises(WeftError, match=r"run\.json has settings of another version of weft: extra"):
        TrainingSettings.read(values | {"extra": 1}, "run.json")
    for wrong in ({"steps": "x"}, {"betas": ["a", "b"]}):
        with pytest.raises(WeftError, match=r"run\.json has invalid settings"):
            TrainingSettings.read(values | wrong, "run.json")


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(WeftError, match="steps and tokens both are the length of the run"):
        TrainingSettings(steps=5, tokens=100)
    with pytest.raises(WeftError, match="width is a setting of init=mup"):
        TrainingSettings(width=64)
    assert TrainingSettings(width=64, init="mup").width == 64
