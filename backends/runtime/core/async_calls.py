"""Calls of a model from asyncio: each runs in a thread, and a cancelled one ends before its next model call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_CANCELLED: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


class CallCancelled(BaseException):
    """Ends a call in a thread after its task was cancelled; not an Exception, which handlers of errors would catch."""


def raise_if_cancelled() -> None:
    """Raise CallCancelled if this code runs in `call_in_thread` of a cancelled task."""
    if (cancelled := _CANCELLED.get()) is not None and cancelled.is_set():
        raise CallCancelled


async def call_in_thread(executor: Executor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a call that runs in a thread of `executor`. Cancelling the task ends the call at its next
    `raise_if_cancelled`. The task waits for that, so that the caches of the call are free afterwards."""
    import asyncio  # here, because commands that run no event loop should not import it

    cancelled, context = threading.Event(), copy_context()
    context.run(_CANCELLED.set, cancelled)
    job = executor.submit(context.run, partial(call, *args, **kwargs))
    try:
        return await asyncio.wrap_future(job)
    except asyncio.CancelledError:
        cancelled.set()
        if not job.cancelled():
            await asyncio.wait([end := asyncio.wrap_future(job)])
            end.exception()  # unread, asyncio would log it
        raise
