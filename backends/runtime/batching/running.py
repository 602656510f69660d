"""Continuous batching: answers join between steps, and their rows are free again as soon as they end.

A round reads some tokens of prompts and takes one step of all rows that have read theirs (Yu et al. 2022, Orca, OSDI;
prompts in chunks between steps as of Agrawal et al. 2023, Sarathi, arXiv 2308.16369).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.ir.errors import WeftError

from ..core.answers import Answer
from ..core.decoder import Decoder
from ..core.rows import BatchContext
from .batch import Batch, push

# Tokens of prompts that are read between two steps: the others wait for them.
READ = {"cpu": 128, "cuda": 2048}


@dataclass
class _Row:
    """An answer in its row: the `text` to read before it decodes, how much of it is `read`, and its next token."""

    answer: Answer
    text: list[int]
    read: int = 0
    since: int = 0  # tokens of the answer when it got the row

    @property
    def decodes(self) -> bool:
        return self.read == len(self.text)

    @property
    def token(self) -> int:
        return self.answer.result.tokens[-1]

    @property
    def turn(self) -> int:
        """Tokens that it got in this row."""
        return len(self.answer.result.tokens) - self.since


class RunningBatch(Batch):
    """A batch whose answers join and leave at any step.

    Where others wait and no row is free, the answer that has had its row for the most tokens, `quantum` at least, goes
    to the end of the queue, and later reads what it has said again: long answers delay others, but do not stop them.

    On a CPU (`compact`) the rows that decode are kept at the front, and a step computes no others; elsewhere a step
    always computes all rows, which takes no longer and needs no copies. Caches grow with the longest text.
    """

    def __init__(self, decoder: Decoder[Any], most: int, quantum: int = 256, compact: bool | None = None) -> None:
        super().__init__(decoder, most)
        self.quantum = quantum
        self._compact = decoder.device_type == "cpu" if compact is None else compact
        self._rows: list[_Row | None] = [None] * most
        self._context: BatchContext | None = None

    @property
    def active(self) -> list[Answer]:
        return [row.answer for row in self._rows if row is not None]

    def leave(self, answer: Answer) -> None:
        if answer in self.waiting:
            self.waiting.remove(answer)
        for at, row in enumerate(self._rows):
            if row is not None and row.answer is answer:
                self._release(at)
                break

    def advance(self) -> list[Answer]:
        changed = self._read()
        return changed + [answer for answer in self._step() if answer not in changed]

    def close(self) -> None:
        self.waiting.clear()
        self._rows = [None] * self.most
        self._drop()

    def _drop(self) -> None:
        if self._context is not None:
            self._context.close()
        self._context = None

    # -- prompts

    def _read(self) -> list[Answer]:
        """Read tokens of one prompt, or several short ones at once; the answers that have got their first token."""
        reading = next((at for at, row in enumerate(self._rows) if row is not None and not row.decodes), None)
        decoding = any(row is not None and row.decodes for row in self._rows)
        budget = READ[self.decoder.device_type] if decoding else self.decoder.chunk
        # Rows that rest repeat their last step: states would go on, so such prompts are read without a pause.
        whole = not self._compact and not self.decoder.rewinds
        first, rows = (reading, 1) if reading is not None else self._seat(budget)
        if not rows:
            return []
        group = [self._row(at) for at in range(first, first + rows)]
        try:
            context = self._room(
                max(len(row.text) if whole else min(len(row.text), row.read + budget) for row in group)
            )
        except WeftError as error:
            longest = max(group, key=lambda row: len(row.text)).answer
            if rows > 1:  # the others may fit
                self._rows[first : first + rows] = [None] * rows
                self.waiting.extendleft(row.answer for row in reversed(group))
            return self._fail(longest, error)
        if reading is None:
            for at in range(first, first + rows):
                context.vacate(at)
        while True:
            parts = [row.text[row.read : row.read + budget] for row in group]
            logits = context.append(first, parts)
            for row, part in zip(group, parts, strict=True):
                row.read += len(part)
            self.read_tokens += sum(map(len, parts))
            if group[0].decodes or not whole:
                break
        drawn = [(row.answer, scores) for row, scores in zip(group, logits, strict=True) if row.decodes]
        self._end([answer for answer, scores in drawn if not push(answer, scores)])
        return [answer for answer, _ in drawn]

    def _seat(self, budget: int) -> tuple[int, int]:
        """Give rows to answers that wait: the first row, and how many. Several at once only if they are read in one
        call of at most `budget` tokens, padding included."""
        if self.waiting and None not in self._rows:
            self._preempt()
        if not self.waiting or None not in self._rows:
            return 0, 0
        first = self._rows.index(None)
        free = next((n for n, row in enumerate(self._rows[first:]) if row is not None), self.most - first)
        longest, count = 0, 0
        while count < min(free, len(self.waiting)):
            answer = self.waiting[count]
            longest = max(longest, len(answer.begin) + len(answer.result.tokens))
            if count and (not self.decoder.padded or longest * (count + 1) > budget):
                break
            count += 1
        for at in range(first, first + count):
            answer = self.waiting.popleft()
            self._rows[at] = _Row(answer, [*answer.begin, *answer.result.tokens], 0, len(answer.result.tokens))
        return first, count

    def _preempt(self) -> None:
        """Send the answer whose turn is longest to the end of the queue, if it has been long enough."""
        turns = [(row.turn, at) for at, row in enumerate(self._rows) if row is not None and row.decodes]
        turn, at = max(turns, default=(0, 0))
        if turn >= self.quantum:
            answer = self._row(at).answer
            self._release(at)
            self.waiting.append(answer)

    # -- steps

    def _step(self) -> list[Answer]:
        """Take one step of all rows that decode: their answers, and those for which there is no memory."""
        failed: list[Answer] = []
        while rows := [at for at, row in enumerate(self._rows) if row is not None and row.decodes]:
            lengths = [self._length(at) for at in rows]
            try:
                context = self._room(max(lengths) + 1)
                break
            except WeftError as error:
                failed += self._fail(self._row(rows[int(np.argmax(lengths))]).answer, error)
        else:
            return failed
        tokens = np.zeros(self.most, np.int64)
        tokens[rows] = [self._row(at).token for at in rows]
        if self._compact:
            scores = context.step_first(tokens[: len(rows)])
        else:
            active = np.zeros(self.most, np.bool_)
            active[rows] = True
            scores = context.step(tokens, active)
        answers = [self._row(at).answer for at in rows]
        going = [push(answer, scores[at]) for at, answer in zip(rows, answers, strict=True)]
        self._end([answer for answer, goes_on in zip(answers, going, strict=True) if not goes_on])
        return failed + answers

    # -- rows

    def _row(self, at: int) -> _Row:
        row = self._rows[at]
        assert row is not None
        return row

    def _length(self, at: int) -> int:
        """The number of tokens that a row holds: the last one drawn is not among them."""
        row = self._row(at)
        return len(row.text) + row.turn - 1

    def _end(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self.leave(answer)

    def _fail(self, answer: Answer, error: WeftError) -> list[Answer]:
        answer.error = error
        self.leave(answer)
        return [answer]

    def _release(self, at: int) -> None:
        """Free a row; where rows are compact, the last one that decodes takes its place, and then one that reads."""
        decoding = self._row(at).decodes
        self._rows[at] = None
        if self._compact:
            last = max((i for i, row in enumerate(self._rows) if row is not None and row.decodes), default=-1)
            if decoding and last > at:
                self._move(last, at)
                at = last
            # It is alone: prompts that are read together are read at once.
            behind = next((i for i, row in enumerate(self._rows) if row is not None and i > at), None)
            if behind is not None:
                self._move(behind, at)
        if not self.active and self._context is not None and self._context.capacity > self.decoder.capacity_for(1):
            self._drop()  # what was long is over: start again with small caches

    def _move(self, row: int, to: int) -> None:
        assert self._context is not None
        self._context.move(row, to)
        self._rows[to], self._rows[row] = self._rows[row], None

    def _room(self, tokens: int) -> BatchContext:
        """Caches for `tokens` tokens a row, with what the rows hold. Raises WeftError when there is no memory."""
        decoder, old = self.decoder, self._context
        if old is not None and old.capacity >= tokens:
            return old
        context: BatchContext
        if old is None:
            context = decoder.new_context(self.most, decoder.capacity_for(tokens))
            # A row that has held nothing has no last step to repeat.
            context.reset() if self._compact else context.prefill([[0]] * self.most)
        else:
            most = min(max(tokens, 2 * old.capacity), decoder.max_length)
            context = decoder.new_context(self.most, decoder.capacity_for(most))
            context.take(old)
            old.close()
        self._context = context
        return context
