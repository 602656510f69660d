"""Peaks of devices for the roofline."""

from __future__ import annotations

import pytest

from weft.backends.viz.model.devices import DEVICES, Device, list_devices

BY_NAME = {device.name: device for device in DEVICES}


def test_rate_depends_on_the_dtype() -> None:
    device = Device("toy", half=8.0, single=2.0, memory=1.0)
    assert [device.rate(dtype) for dtype in ("f16", "bf16", "f32")] == [8.0, 8.0, 2.0]


def test_ridge_points_are_those_of_the_data_sheets() -> None:
    """FLOPs per byte at which a device is bound by both: 989.5 TFLOP/s over 3.35 TB/s, 312 TFLOP/s over 2.039 TB/s."""
    ridge = {name: BY_NAME[name].rate("f16") / BY_NAME[name].memory for name in ("H100", "A100")}
    assert ridge == {"H100": pytest.approx(295.4, abs=0.1), "A100": pytest.approx(153.0, abs=0.1)}


def test_page_data_has_every_device_and_dtype() -> None:
    data = list_devices()
    assert data["tokens"] == 512 and data["dtypes"] == {"f16": 2, "bf16": 2, "f32": 4}
    assert [*data["devices"]] == [*BY_NAME]
    assert data["devices"]["A100"] == {"rates": {"f16": 312e12, "bf16": 312e12, "f32": 19.5e12}, "memory": 2.039e12}
