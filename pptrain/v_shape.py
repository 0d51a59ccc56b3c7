"""Two stages a rank in a V: the first rank has the last stage too, so that it comes by its backwards early."""

from __future__ import annotations

from itertools import count

from pptrain.schedule import Action, Kind, Schedule, check_sizes, spread, vee

_PERIOD = 6
"""Slots of a microbatch on each rank: F, I and W of two stages."""


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Zero bubble with 1F1B's memory: where F, I and W cost the same no rank waits.

    Every rank holds the residuals of at most 2P microbatches, each of one of its two stages, which is as much as P of
    1F1B. With 2 ranks and 4 microbatches::

        rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
        rank 1   .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    Fewer than 2P - 1 microbatches are the first of so many.

    Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory, https://arxiv.org/abs/2405.15362
    """
    check_sizes("zb-v", num_ranks, num_microbatches)
    padded = max(num_microbatches, 2 * num_ranks - 1)
    rows = tuple(
        tuple(action for action in _zb_v_row(rank, num_ranks, padded) if action.microbatch < num_microbatches)
        for rank in range(num_ranks)
    )
    return Schedule("zb-v", num_microbatches, vee(num_ranks), rows)


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """About half of 1F1B's memory and a smaller bubble.

    Every rank holds the residuals of at most P + 1 microbatches (P + 3 for an even P), each of one of its two stages.
    With 3 ranks and 3 microbatches::

        rank 0   0F0 0F1 .   .   .   5F0 5I0 5W0 0F2 .   5F1 5I1 5W1 0I0 0W0 5F2 5I2 5W2 0I1 0W1 .   .   .   0I2 0W2
        rank 1   .   1F0 .   .   4F0 1F1 .   4I0 4W0 4F1 1F2 1I0 4I1 4W1 4F2 1W0 .   1I1 4I2 4W2 1W1 .   1I2 1W2 .
        rank 2   .   .   2F0 3F0 .   .   2F1 3F1 3I0 3W0 2I0 2W0 2F2 3F2 3I1 3W1 2I1 2W1 .   3I2 3W2 2I2 2W2 .   .

    Source: as `zb_v`; each microbatch goes through the ranks in the same pattern, 6 slots after the one before.
    """
    p, gap = num_ranks, 3 * (num_ranks % 2 == 0)
    firsts = [(2 * r, 3 * p - 2 - r, 3 * p - 1 + gap + 2 * r, 6 * p - 2 + gap - r) for r in range(p)]
    return _repeated("v-half", num_ranks, num_microbatches, firsts)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """The least memory that two stages a rank allow, about a third of 1F1B's, with a bubble below its.

    Every rank holds the residuals of at most 2 + 2 ceil((P - 1) / 3) microbatches, each of one of its two stages. With
    3 ranks and 2 microbatches::

        rank 0   0F0 .   .   .   .   5F0 0F1 5I0 5W0 .   .   5F1 .   0I0 5I1 5W1 0W0 .   .   0I1 0W1
        rank 1   .   1F0 .   .   4F0 .   .   1F1 4I0 .   4F1 4W0 1I0 1W0 .   4I1 4W1 .   1I1 1W1 .
        rank 2   .   .   2F0 3F0 .   .   .   .   2F1 3F1 3I0 2I0 3W0 2W0 .   .   3I1 2I1 3W1 2W1 .

    Source: as `zb_v`; each microbatch goes through the ranks in the same pattern, 6 slots after the one before.
    """
    p, gap = num_ranks, 2 * (num_ranks % 3 == 0)
    firsts = [(r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p - 1 + gap - r) for r in range(p)]
    return _repeated("v-min", num_ranks, num_microbatches, firsts)


def _repeated(name: str, num_ranks: int, num_microbatches: int, firsts: list[tuple[int, int, int, int]]) -> Schedule:
    """The schedule that repeats a pattern every 6 slots: what would fall before or after it is left out, gaps closed.

    Args:
        name: Of the schedule.
        num_ranks: How many there are.
        num_microbatches: How many times.
        firsts: For each rank the slots in which the first microbatch goes down, up, back down and back up.
    """
    check_sizes(name, num_ranks, num_microbatches)
    slots = [
        (slot + _PERIOD * j, action)
        for rank, first in enumerate(firsts)
        for slot, (stage, kind) in _with_weight_parts(first, rank, 2 * num_ranks - 1 - rank).items()
        for j in range(num_microbatches)
        for action in [Action(stage, kind, j)]
    ]
    return spread(name, num_microbatches, vee(num_ranks), [action for _, action in sorted(slots)])


def _with_weight_parts(first: tuple[int, int, int, int], down: int, up: int) -> dict[int, tuple[int, Kind]]:
    """A rank's pattern by slot: each weight part stands in the next slot that no repetition of the others takes."""
    pattern: dict[int, tuple[int, Kind]] = dict(
        zip(first, [(down, "F"), (up, "F"), (up, "I"), (down, "I")], strict=True)
    )
    for stage, slot in ((up, first[2]), (down, first[3])):
        taken = {slot % _PERIOD for slot in pattern}
        pattern[next(free for free in count(slot + 1) if free % _PERIOD not in taken)] = stage, "W"
    return pattern


def _zb_v_row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    down, up = rank, 2 * num_ranks - 1 - rank
    given = dict[tuple[int, Kind], int]()
    row = list[Action]()

    def add(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            j = given.get((stage, kind), 0)
            given[stage, kind] = j + 1
            row.append(Action(stage, kind, j))

    for _ in range(2 * (num_ranks - rank) - 1):
        add(down, "F")
    for _ in range(rank):
        add(up, "F")
        add(down, "F")
    for _ in range(num_ranks - rank):
        add(up, "F", "I", "W")
    while given[up, "F"] < num_microbatches:
        if given[down, "F"] < num_microbatches:
            add(down, "F")
        add(down, "I", "W")
        add(up, "F", "I", "W")
    for _ in range(rank):
        add(down, "I")
        add(up, "I")
    for _ in range(num_ranks - rank):
        add(down, "I", "W")
    for stage in (up, down):
        while given[stage, "W"] < num_microbatches:
            add(stage, "W")
    return row
