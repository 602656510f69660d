"""A doubly linked list that may be edited while it is iterated over.

Iteration visits items inserted after the current item, and none inserted before it. Any item may be removed, even the
current one: a removed item keeps its links.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar


class LinkedElement:
    """An element of a `LinkedList`; `erased` becomes True when it is removed from the list."""

    __slots__ = ("_next", "_prev", "erased")

    def __init__(self) -> None:
        self.erased = False
        self._prev: Any = None  # items of the same list
        self._next: Any = None


L = TypeVar("L", bound=LinkedElement)


class LinkedList(Generic[L]):
    """A doubly linked list of items; inserting and removing take constant time."""

    def __init__(self) -> None:
        self._first: L | None = None
        self._last: L | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[L]:
        # An iterator at an erased item follows its old links, and may pass other erased items.
        return (item for item in _walk(self._first, "_next") if not item.erased)

    def __reversed__(self) -> Iterator[L]:
        return (item for item in _walk(self._last, "_prev") if not item.erased)

    def items_before(self, item: L) -> Iterator[L]:
        """Yield the items before `item`, nearest first."""
        return _walk(item._prev, "_prev")

    def items_after(self, item: L) -> Iterator[L]:
        """Yield the items after `item`, nearest first."""
        return _walk(item._next, "_next")

    def insert(self, item: L, before: L | None = None) -> None:
        """Insert `item` before the item `before` (if that was removed: before its successor), or at the end if None."""
        # Erased items keep their links, so this finds the next item that is still in the list.
        while before is not None and before.erased:
            before = before._next
        after = before._prev if before is not None else self._last
        item._prev, item._next = after, before
        if after is None:
            self._first = item
        else:
            after._next = item
        if before is None:
            self._last = item
        else:
            before._prev = item
        self._count += 1

    def remove(self, item: L) -> None:
        """Remove `item`. Iterators whose current item it is can continue, since `item` keeps its links."""
        if item._prev is None:
            self._first = item._next
        else:
            item._prev._next = item._next
        if item._next is None:
            self._last = item._prev
        else:
            item._next._prev = item._prev
        item.erased = True
        self._count -= 1

    def find_first(self, items: Iterable[L]) -> L:
        """Return the item of `items` (at least one) that comes first in this list, in time linear in their distance."""
        first, *rest = dict.fromkeys(items)
        remaining: set[L | None] = set(rest)
        for before, after in itertools.zip_longest(self.items_before(first), self.items_after(first)):
            if not remaining:
                break
            first = before if before and before in remaining else first
            remaining -= {before, after}
        return first


def _walk(item: L | None, link: str) -> Iterator[L]:
    """Yield `item` and its successors by `link`, "_next" or "_prev"; a link is read when the next item is needed."""
    while item is not None:
        yield item
        item = getattr(item, link)
