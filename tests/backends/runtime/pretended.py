"""A simulated CUDA device: the CUDA path of the runtime, tested where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
from numpy.typing import NDArray


class Device:
    """onnxruntime with a pretended device: OrtValues on "cuda" are memory of their own, reached only by copies."""

    def __init__(self, ort: Any, session: Any) -> None:
        self.RunOptions, self.OrtValue, self._ort, self._session = ort.RunOptions, self, ort, session
        self.graph_ids: list[str] = []
        self.released: list[int] = []

    def pretend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the onnxruntime of the runtime."""
        for module in ("bound_states", "session"):
            monkeypatch.setattr(f"weft.backends.runtime.ort.{module}.import_onnxruntime", lambda: self)

    def ortvalue_from_numpy(self, values: NDArray[Any], device: str, number: int) -> Any:
        assert (device, number) == ("cuda", 0)
        return self._ort.OrtValue.ortvalue_from_numpy(values.copy(), "cpu", 0)

    def io_binding(self) -> Any:
        binding = self._session.io_binding()

        class Binding:
            def __getattr__(self, name: str) -> Any:
                bind = getattr(binding, name)

                def call(key: str, device: Any, *rest: Any) -> None:
                    bind(key, "cpu" if isinstance(device, str) else device, *rest)

                return call

        self.real = {**getattr(self, "real", {}), id(wrapped := Binding()): binding}
        self._alive = [*getattr(self, "_alive", []), wrapped]
        return wrapped

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        if options is not None:
            self.graph_ids.append(options.get_run_config_entry("gpu_graph_id"))
        self._session.run_with_iobinding(self.real[id(binding)])

    def release_captured_graph(self, number: int) -> None:
        self.released.append(number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)
