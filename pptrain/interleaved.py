"""Several stages a rank, looped through: a bubble as many times smaller, for as many times the messages."""

from __future__ import annotations

from pptrain.schedule import Action, Kind, Schedule, check_sizes, loop


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """1F1B over the ranks several times: stage s lies on rank s % P, and microbatches go in groups of P.

    A rank takes a group through its first stage, then through its second, and so on. With 2 ranks of 2 stages and 4
    microbatches::

        rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        rank 1   .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

    Any number of microbatches: those of the next multiple of P, the surplus left out. (What is left of an order that
    can be run can be run, since no microbatch needs another.)

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2
    """
    check_sizes("interleaved", num_ranks, num_microbatches, stages_per_rank)
    rows = tuple(
        tuple(action for action in _row(rank, num_ranks, num_microbatches, stages_per_rank))
        for rank in range(num_ranks)
    )
    return Schedule("interleaved", num_microbatches, loop(num_ranks, stages_per_rank), rows)


def _row(rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[Action]:
    stages = range(rank, num_ranks * stages_per_rank, num_ranks)
    groups = range(0, num_microbatches, num_ranks)
    turns = [(stage, j) for group in groups for stage in stages for j in range(group, group + num_ranks)]
    back = [(stage, j) for group in groups for stage in reversed(stages) for j in range(group, group + num_ranks)]
    # Down to the last stage and back up to this rank's last, and one round for each stage that it has before its last.
    warmup = min(2 * (num_ranks - 1 - rank) + (stages_per_rank - 1) * num_ranks, len(turns))
    forwards, backwards = _actions("F", turns), _actions("B", back)
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    padded = forwards[:warmup] + steady + backwards[len(turns) - warmup :]
    return [action for action in padded if action.microbatch < num_microbatches]


def _actions(kind: Kind, turns: list[tuple[int, int]]) -> list[Action]:
    return [Action(stage, kind, j) for stage, j in turns]
