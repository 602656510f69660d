"""Settings of a server."""

from __future__ import annotations

from dataclasses import dataclass

from weft.backends.runtime.core.prefixes import LIMIT
from weft.backends.runtime.core.sampler import check_count
from weft.backends.runtime.core.speculation import MOST
from weft.ir.errors import WeftError


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server: the `name` of its model, its clients, its limits.

    max_batch: answers or inputs in one batch. max_queue: waiting answers. max_body: bytes of a request body.
    client_timeout: seconds without data after which a client is disconnected. prefix_cache: MiB of stored caches.
    prompt_lookup: tokens of a draft. drain: seconds that running answers have after a signal.
    api_key: key that requests must carry, if set. hosts: host names that requests may use, if set.

    Raises WeftError for a value outside its range.
    """

    name: str
    max_batch: int = 16
    max_queue: int = 256
    prefix_cache: int = LIMIT
    prompt_lookup: int = MOST
    api_key: str | None = None
    max_body: int = 4 << 20
    client_timeout: float = 30.0
    drain: float = 30.0
    hosts: frozenset[str] | None = None

    def __post_init__(self) -> None:
        for field in ("max_batch", "max_queue", "max_body"):
            check_count(field, getattr(self, field))
        for field in ("prefix_cache", "prompt_lookup"):
            if getattr(self, field) != 0:
                check_count(field, getattr(self, field))
        for field, minimum in (("client_timeout", 0.1), ("drain", 0.0)):
            if not minimum <= (value := getattr(self, field)) < float("inf"):
                raise WeftError(f"{field} is {value}, but it must be a finite number of seconds, at least {minimum:g}")
        if not (self.name and self.name.isprintable()):
            raise WeftError(f"the model's name {self.name!r} is empty or not printable: choose another by --model-name")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise WeftError("the API key must consist of printable ASCII characters, at least one")
