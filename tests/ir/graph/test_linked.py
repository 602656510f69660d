"""A linked list that is edited while it is iterated over, against a Python list."""

from __future__ import annotations

import numpy as np

from weft.ir.graph.linked import LinkedElement, LinkedList


class Item(LinkedElement):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


def build(texts: str) -> tuple[LinkedList[Item], list[Item]]:
    """Return a list with an item per character, and these items."""
    linked: LinkedList[Item] = LinkedList()
    items = [Item(c) for c in texts]
    for item in items:
        linked.insert(item)
    return linked, items


def read(linked: LinkedList[Item]) -> str:
    """Return the texts of the items, after checking both directions and the length."""
    text = "".join(item.text for item in linked)
    assert text[::-1] == "".join(item.text for item in reversed(linked)) and len(linked) == len(text)
    return text


def test_random_edits_give_the_same_order_as_a_python_list(rng: np.random.Generator) -> None:
    linked, items = build("")
    for n in range(200):
        if items and rng.random() < 0.4:
            linked.remove(items.pop(rng.integers(len(items))))
        else:
            at = int(rng.integers(len(items) + 1))
            item = Item(chr(0x4E00 + n))
            linked.insert(item, before=items[at] if at < len(items) else None)
            items.insert(at, item)
        assert read(linked) == "".join(item.text for item in items)


def test_iteration_visits_later_insertions_and_skips_removed_items() -> None:
    linked, (a, b, c, d) = build("abcd")
    visited = []
    for item in linked:
        visited.append(item.text)
        if item is a:
            linked.insert(Item("x"), before=a)
            linked.insert(Item("y"), before=b)
            linked.remove(c)
        if item is b:
            linked.remove(b)
    assert visited == ["a", "y", "b", "d"] and read(linked) == "xayd"
    assert (b.erased, c.erased, d.erased) == (True, True, False)


def test_insertion_before_a_removed_item_is_before_its_successor() -> None:
    linked, (_, b, c, _) = build("abcd")
    linked.remove(c)
    linked.remove(b)
    linked.insert(Item("x"), before=b)
    assert read(linked) == "axd"


def test_neighbours_are_nearest_first_and_the_first_of_a_set_is_found() -> None:
    linked, items = build("abcdef")
    assert "".join(i.text for i in linked.items_before(items[3])) == "cba"
    assert "".join(i.text for i in linked.items_after(items[3])) == "ef"
    for texts in ("d", "fa", "ecd", "bbf", "dfce"):
        assert linked.find_first(items[ord(t) - ord("a")] for t in texts).text == min(texts)
