"""From a question to an answer: what to run, or a clear no with what would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pptrain.plan import RECOMPUTE, Machines, Option, best, options, roomiest
from pptrain.registry import SCHEDULES
from pptrain.sizes import Sizes
from pptrain.stage import Recompute

_MORE_RANKS = 8


@dataclass(frozen=True)
class Question:
    """A model, machines, and what of the rest is fixed."""

    look: Callable[[int, int], Sizes]
    """Sizes for microbatches of so many rows and tokens."""
    machines: Callable[[Sizes, int], Machines]
    """So many of them; where more are asked for than there are, the last one again and again."""
    num_ranks: int
    batch_size: int
    num_microbatches: int
    seq: int
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    recomputes: tuple[Recompute, ...] = RECOMPUTE

    @property
    def rows(self) -> int:
        """Of the largest microbatch."""
        return -(-self.batch_size // self.num_microbatches)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a question."""

    options: tuple[Option, ...]
    """Every schedule in one recompute mode, which is the recommended one's, or the one that comes closest."""
    recommended: Option | None
    closest: Option
    """The recommended one, or else the one that lacks the least."""
    remedies: tuple[str, ...]
    """Where nothing fits, what would make it fit, each alone."""


def answer(question: Question) -> Answer:
    """Try everything that the question leaves open.

    Raises:
        PartitionError: If there are more ranks than layers.
    """
    found = _tried(question)
    recommended = best(found)
    closest = recommended or roomiest(found)
    shown = tuple(one for one in found if one.recompute == closest.recompute)
    return Answer(shown, recommended, closest, () if recommended else tuple(_remedies(question)))


def _tried(question: Question) -> list[Option]:
    sizes = question.look(question.rows, question.seq)
    machines = question.machines(sizes, question.num_ranks)
    return options(sizes, machines, question.num_microbatches, question.schedules, question.recomputes)


def _remedies(question: Question) -> Iterator[str]:
    """For each kind of change, the smallest that helps."""
    for kind in (_other_ways, _smaller_microbatches, _fewer_microbatches, _shorter_rows, _more_ranks):
        for text, changed in kind(question):
            if best(_tried(changed)) is not None:
                yield text
                break


Changes = Iterator[tuple[str, Question]]


def _other_ways(question: Question) -> Changes:
    for recompute in RECOMPUTE:
        if recompute not in question.recomputes:
            yield f"--recompute {recompute}", replace(question, recomputes=(recompute,))
    if len(question.schedules) < len(SCHEDULES):
        yield "another --schedule", replace(question, schedules=tuple(SCHEDULES))


def _smaller_microbatches(question: Question) -> Changes:
    for rows in range(question.rows - 1, 0, -1):
        count = -(-question.batch_size // rows)
        yield f"--microbatches {count}, of {_rows(rows)} each", replace(question, num_microbatches=count)


def _fewer_microbatches(question: Question) -> Changes:
    for count in range(question.num_microbatches - 1, 0, -1):
        batch = count * question.rows
        text = f"fewer microbatches: --batch-size {batch} --microbatches {count}"
        yield text, replace(question, batch_size=batch, num_microbatches=count)


def _shorter_rows(question: Question) -> Changes:
    seq = question.seq // 2
    while seq >= 64:
        yield f"--max-seq-length {seq}", replace(question, seq=seq)
        seq //= 2


def _more_ranks(question: Question) -> Changes:
    sizes = question.look(question.rows, question.seq)
    for count in range(question.num_ranks + 1, min(question.num_ranks + _MORE_RANKS, sizes.num_layers) + 1):
        memory = question.machines(sizes, count).memory_bytes[-1]
        yield f"{count} ranks, the new ones with {memory / 1e9:.0f} GB to use each", replace(question, num_ranks=count)


def _rows(count: int) -> str:
    return f"{count} row" + "s" * (count != 1)


def same(values: Sequence[float], count: int) -> tuple[float, ...]:
    """One value for each of so many ranks: the last stands for those that are not listed."""
    return tuple(values[min(rank, len(values) - 1)] for rank in range(count))
