"""The end of a server: running answers may finish, waiting ones are refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from weft.frontends.app.serve.server import is_loopback, listen
from weft.ir.errors import WeftError

from .serving import TEXT, held, prompt, served, until
from .serving import client as official


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("in_time", [False, True])
def test_shutdown_ends_running_answers_and_refuses_waiting_ones(folder: Path, stream: bool, in_time: bool) -> None:
    """Running answers may end, waiting ones are refused; those that do not end in time are told so."""
    drain = 30 if in_time else 0.2
    with served(folder, max_batch=1, drain=drain) as server, ThreadPoolExecutor(2) as threads:
        worker = server.service.worker

        def ask(number: int) -> str:
            with official(server) as client:
                found: Any = client.completions.create(**{**TEXT, "prompt": prompt(number)}, stream=stream)
                return "".join(c.choices[0].text for c in found) if stream else str(found.choices[0].text)

        with held(server) as hold:
            asking = [threads.submit(ask, 0)]
            until(lambda: worker.n_waiting == 1)
            hold.step()
            until(lambda: worker.n_running == 1)
            asking.append(threads.submit(ask, 1))
            until(lambda: worker.n_waiting == 1)
            server.stop()
            until(lambda: server.service.closing if in_time else cast(Any, worker)._ended)
        for number, answer in enumerate(asking):
            if in_time and number == 0:
                assert isinstance(answer.result(60), str)
                continue
            with pytest.raises(openai.APIError, match="shutting down"):
                answer.result(60)


def test_listening_on_a_free_port_and_on_one_in_use() -> None:
    with listen("127.0.0.1", 0) as listening:
        assert is_loopback(listening)
        port = listening.getsockname()[1]
        with pytest.raises(WeftError, match=f"port {port} of 127.0.0.1 is in use: choose another with --port"):
            listen("127.0.0.1", port)
    with listen("0.0.0.0", 0) as listening:
        assert not is_loopback(listening)
    with pytest.raises(WeftError, match=r"--host 300\.0\.0\.1 is not an address of this machine"):
        listen("300.0.0.1", 0)
