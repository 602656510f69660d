"""Continuous batching: answers join between steps, and their rows are free again as soon as they end.

A round reads a chunk of prompt tokens, then runs one decode step of all rows whose prompt is complete (Yu et al. 2022,
Orca, OSDI; chunked prefill between steps: Agrawal et al. 2023, Sarathi, arXiv 2308.16369).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from weft.ir.errors import WeftError

from ..core.answers import Answer, verify_drafts
from ..core.batch_context import BatchContext
from ..core.decoder import CachedDecoder
from ..core.prefixes import PrefixCache
from ..core.speculation import ThriftyDrafts
from .batch import Batch, draw_token

# Prompt tokens read between two decode steps; decoding rows wait meanwhile.
PROMPT_CHUNK = {"cpu": 128, "cuda": 2048}


@dataclass
class _Row:
    """The answer in a batch row. It decodes once all tokens of `sequence` are cached; `read` of them are so far."""

    answer: Answer
    sequence: list[int]
    read: int = 0
    resumed_at: int = 0  # tokens of the answer when it got the row
    is_saved: bool = False  # `sequence` is among the prefixes
    drafts: ThriftyDrafts | None = None

    @property
    def decodes(self) -> bool:
        return self.read == len(self.sequence)

    @property
    def new_tokens(self) -> int:
        """Return the number of tokens generated since the answer got this row."""
        return len(self.answer.result.tokens) - self.resumed_at


class RunningBatch(Batch):
    """A batch whose answers join and leave at any step. Its caches grow with the longest sequence.

    If answers wait and no row is free, the answer that generated the most tokens since it got its row goes to the end
    of the queue, provided that it generated at least `quantum`. Later its prompt and its own tokens run again, unless
    `prefixes` has their caches.

    With `compact` (None: on a CPU) the decoding rows are moved to the front, and a step computes only these rows.
    Otherwise a step computes all rows, which takes no longer on a GPU and needs no copies.
    """

    def __init__(
        self,
        decoder: CachedDecoder[Any],
        most: int,
        quantum: int = 256,
        compact: bool | None = None,
        prefixes: PrefixCache | None = None,
        prompt_lookup: int = 0,
    ) -> None:
        super().__init__(decoder, most)
        self.prefixes = PrefixCache(0) if prefixes is None else prefixes
        self.quantum = quantum
        self._compact = decoder.device_type == "cpu" if compact is None else compact
        # Drafts are verified in the first rows, where compact batches keep the decoding rows.
        self._prompt_lookup = prompt_lookup if self._compact and decoder.drafts_pay else 0
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
                self._release_row(at)
                break

    def advance(self) -> list[Answer]:
        self._save_prompts()
        changed = self._read_prompts()
        return changed + [answer for answer in self._decode() if answer not in changed]

    def close(self) -> None:
        self.waiting.clear()
        self._rows = [None] * self.most
        self._drop_context()

    def _drop_context(self) -> None:
        if self._context is not None:
            self._context.close()
        self._context = None

    # -- prompts

    def _read_prompts(self) -> list[Answer]:
        """Run a chunk of one prompt, or several short prompts in one call. If idle rows would advance recurrent states
        between chunks, all chunks run in this call. Return the answers whose prompt is now complete, each with its next
        token or an error; if the caches cannot grow, only the answer with the longest sequence, which gets the error.
        """
        reading = next((at for at, row in enumerate(self._rows) if row is not None and not row.decodes), None)
        decoding = any(row is not None and row.decodes for row in self._rows)
        budget = PROMPT_CHUNK[self.decoder.device_type] if decoding else self.decoder.chunk
        # Idle rows repeat their last step, which would advance recurrent states: read such prompts without a pause.
        in_one_go = not self._compact and not self.decoder.can_rewind
        first, rows = (reading, 1) if reading is not None else self._assign_rows(budget)
        if not rows:
            return []
        group = [self._get_row(at) for at in range(first, first + rows)]
        try:
            context = self._grow_context(
                max(len(row.sequence) if in_one_go else min(len(row.sequence), row.read + budget) for row in group)
            )
        except WeftError as error:
            longest = max(group, key=lambda row: len(row.sequence)).answer
            if rows > 1:  # the rest may fit
                self._rows[first : first + rows] = [None] * rows
                self.waiting.extendleft(row.answer for row in reversed(group))
            return self._fail_answer(longest, error)
        if reading is None:
            for at, row in enumerate(group, first):
                context.clear_row(at)
                row.read = self.prefixes.load(self.decoder, context, at, row.sequence) if row.read else 0
                if not row.resumed_at:
                    row.answer.result.timings.cached_tokens = row.read
        while True:
            # No call of one token at the end of a prompt: it would round differently, see `CachedDecoder.rounds`.
            count = budget - (len(group[0].sequence) - group[0].read == budget + 1 > 2)
            parts = [row.sequence[row.read : row.read + count] for row in group]
            logits = context.append(first, parts)
            for row, part in zip(group, parts, strict=True):
                row.read += len(part)
            self.read_tokens += sum(map(len, parts))
            if group[0].decodes or not in_one_go:
                break
        drawn = [(row.answer, scores) for row, scores in zip(group, logits, strict=True) if row.decodes]
        self._remove_answers([answer for answer, scores in drawn if not draw_token(answer, scores)])
        return [answer for answer, _ in drawn]

    def _assign_rows(self, budget: int) -> tuple[int, int]:
        """Assign adjacent free rows to the first waiting answers; return (first row, number of rows), or (0, 0) if no
        answer can join. `_requeue_longest` may free a row. Several answers get rows only if the decoder allows padding,
        their sequences, padded, fit one call of `budget` tokens, and none begins with a stored prefix."""
        if self.waiting and None not in self._rows:
            self._requeue_longest()
        if not self.waiting or None not in self._rows:
            return 0, 0
        first = self._rows.index(None)
        free = next((n for n, row in enumerate(self._rows[first:]) if row is not None), self.most - first)
        longest, rows = 0, list[_Row]()
        while len(rows) < min(free, len(self.waiting)):
            answer = self.waiting[len(rows)]
            row = _Row(answer, [*answer.begin, *answer.result.tokens], 0, len(answer.result.tokens))
            longest, row.read = max(longest, len(row.sequence)), self.prefixes.count(self.decoder, row.sequence)
            if rows and (not self.decoder.padded or longest * (len(rows) + 1) > budget or row.read):
                break
            rows.append(row)
            if row.read:
                break
        for at, row in enumerate(rows, first):
            self.waiting.popleft()
            self._rows[at] = row
        return first, len(rows)

    def _requeue_longest(self) -> None:
        """Move the answer with the most tokens generated in its row, if at least `quantum`, to the end of the queue."""
        candidates = [(row.new_tokens, at) for at, row in enumerate(self._rows) if row is not None and row.decodes]
        most, at = max(candidates, default=(0, 0))
        if most >= self.quantum:
            answer = self._get_row(at).answer
            self._release_row(at)
            self.waiting.append(answer)

    def _save_prompts(self) -> None:
        """Store caches of newly complete prompts: now, as their tokens have been sent; snapshots only at the end."""
        for at, row in enumerate(self._rows if self.decoder.can_rewind else ()):
            if row is not None and row.decodes and not row.is_saved:
                assert self._context is not None
                self.prefixes.save(self.decoder, self._context, at, len(self._get_row(at).sequence))
                row.is_saved = True

    # -- steps

    def _decode(self) -> list[Answer]:
        """Run one step of all decoding rows; return answers without memory, then those with a token or an error."""
        failed: list[Answer] = []
        while rows := [at for at, row in enumerate(self._rows) if row is not None and row.decodes]:
            lengths = [self._count_cached(at) for at in rows]
            try:
                context = self._grow_context(max(lengths) + 1)
                break
            except WeftError as error:
                failed += self._fail_answer(self._get_row(rows[int(np.argmax(lengths))]).answer, error)
        else:
            return failed
        answers, tokens = [self._get_row(at).answer for at in rows], np.zeros(self.most, np.int64)
        tokens[rows] = [answer.result.tokens[-1] for answer in answers]
        drafts = self._get_drafts(rows)
        if drafts is not None and self._verify_drafts(context, answers[0], drafts):
            return failed + answers
        if self._compact:
            start = perf_counter()
            scores = context.step_first(tokens[: len(rows)])
            if drafts is not None:
                drafts.record(0, 0, perf_counter() - start)
        else:
            active = np.zeros(self.most, np.bool_)
            active[rows] = True
            scores = context.step(tokens, active)
        drawn = zip(rows, answers, strict=True)
        self._remove_answers([answer for at, answer in drawn if not draw_token(answer, scores[at])])
        return failed + answers

    def _get_drafts(self, rows: Sequence[int]) -> ThriftyDrafts | None:
        """Return the source of drafts of the only row, created once; None if there are several or it samples."""
        row = self._get_row(rows[0])
        if not self._prompt_lookup or len(rows) > 1 or row.answer.sampler.sampling.temperature:
            return None
        row.drafts = row.drafts or ThriftyDrafts(self._prompt_lookup)
        return row.drafts

    def _verify_drafts(self, context: BatchContext, answer: Answer, drafts: ThriftyDrafts) -> bool:
        """Decode `answer`, in the first row, by drafts; return False, and run nothing, if there are none."""
        timings = answer.result.timings
        before = timings.drafted_tokens, timings.accepted_tokens
        token, active = np.array(answer.result.tokens[-1:]), np.ones(1, np.bool_)
        if not verify_drafts(context, [answer], [drafts], token, active, draw_token):
            return False
        self.drafted_tokens += timings.drafted_tokens - before[0]
        self.accepted_tokens += timings.accepted_tokens - before[1]
        self._remove_answers([] if active[0] else [answer])
        return True

    # -- rows

    def _get_row(self, at: int) -> _Row:
        row = self._rows[at]
        assert row is not None
        return row

    def _count_cached(self, at: int) -> int:
        """Return the number of tokens that row `at` has cached: all except the last token drawn."""
        row = self._get_row(at)
        return len(row.sequence) + row.new_tokens - 1

    def _remove_answers(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self.leave(answer)

    def _fail_answer(self, answer: Answer, error: WeftError) -> list[Answer]:
        answer.error = error
        self.leave(answer)
        return [answer]

    def _release_row(self, at: int) -> None:
        """Store the caches of row `at` unless its answer failed, and free the row. A compact batch moves its last
        decoding row there, and the row whose prompt still runs, if any, to the end of the decoding rows. Close the
        context if no answer is left and it has more than the minimum capacity."""
        answer, decoding = self._get_row(at).answer, self._get_row(at).decodes
        if decoding and answer.error is None and self._context is not None:
            self.prefixes.save(self.decoder, self._context, at, len(self._get_row(at).sequence))
        self._rows[at] = None
        if self._compact:
            last = max((i for i, row in enumerate(self._rows) if row is not None and row.decodes), default=-1)
            if decoding and last > at:
                self._move_row(last, at)
                at = last
            # At most one row still reads: prompts that are read together finish in one call.
            reading = next((i for i, row in enumerate(self._rows) if row is not None and i > at), None)
            if reading is not None:
                self._move_row(reading, at)
        if not self.active and self._context is not None and self._context.capacity > self.decoder.compute_capacity(1):
            self._drop_context()  # the long answers are over: start again with small caches

    def _move_row(self, row: int, to: int) -> None:
        assert self._context is not None
        self._context.copy_row(row, to)
        self._rows[to], self._rows[row] = self._rows[row], None

    def _grow_context(self, tokens: int) -> BatchContext:
        """Return the context of the batch with a capacity of at least `tokens` tokens per row; a larger context is
        allocated, and the rows copied, if necessary. Raises WeftError when memory is insufficient."""
        decoder, old = self.decoder, self._context
        if old is not None and old.capacity >= tokens:
            return old
        if old is not None:
            tokens = min(max(tokens, 2 * old.capacity), decoder.max_length)
        capacity = decoder.compute_capacity(tokens)
        try:
            context: BatchContext = decoder.new_context(self.most, capacity)
        except WeftError:
            self.prefixes.clear()  # their memory may be enough
            context = decoder.new_context(self.most, capacity)
        if old is None:
            # An idle row repeats its last step, so every row needs one.
            context.reset() if self._compact else context.prefill([[0]] * self.most)
        else:
            context.copy_from(old)
            old.close()
        self._context = context
        return context
