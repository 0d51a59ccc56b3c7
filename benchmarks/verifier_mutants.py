"""The verifier's mutation score: how many programs with one mistake it rejects.

    python benchmarks/verifier_mutants.py

Valid programs of every schedule, for stages in a row and several on a rank, whole backwards and backwards in parts,
both kinds of lanes; in each, one instruction is dropped, doubled or moved, or two are swapped. Whether a mutant is
right is decided by its definition, run in every interleaving (`by_definition.py`); each wrong one has to be rejected,
and each that is still right has to be accepted.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from by_definition import Broken, Machine, Rules

from pptrain.notation import program_to_csv
from pptrain.program import Program, lower
from pptrain.registry import SCHEDULES
from pptrain.schedule import Action, Placement, Schedule, forward_only, loop, spread
from pptrain.simulate import simulate
from pptrain.verify import Verdicts, verify
from transports import Lanes

Change = Literal["swap", "drop", "double", "move"]
CHANGES: tuple[Change, ...] = get_args(Change)

PLACEMENTS = ((0, 0, 1), (0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 0))
"""Stages in places that are not a schedule's own."""

CAPACITIES = (0, 1, 2, None)


@dataclass(frozen=True)
class Case:
    """A program, and all that decides whether it is right."""

    schedule: str
    placement: Placement
    num_microbatches: int
    lanes: Lanes
    capacity: int | None
    cotangents: tuple[int, ...]
    is_training: bool
    programs: tuple[Program, ...]

    def verify(self) -> Verdicts:
        """What the verifier says."""
        return verify(
            self.programs,
            self.placement,
            self.num_microbatches,
            capacity=self.capacity,
            lanes=self.lanes,
            cotangents=self.cotangents,
            is_training=self.is_training,
        )

    def broken_by_definition(self) -> str | None:
        """What the definition says: the rule that does not hold."""
        rules = Rules(self.placement, self.num_microbatches, self.cotangents, self.is_training)
        try:
            rules.check(Machine(self.programs, self.capacity, self.lanes))
        except Broken as broken:
            return str(broken)
        return None

    def __str__(self) -> str:
        return (
            f"{self.schedule}, placement {self.placement}, {self.lanes} lanes, capacity {self.capacity}, "
            f"cotangents {self.cotangents}:\n{program_to_csv(self.programs)}"
        )


def schedule_of(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """A schedule by its name; `+parts` and `+late` take backwards apart, `evaluation` has none."""
    name, _, parts = name.partition("+")
    if name == "evaluation":
        return forward_only(loop(num_ranks), num_microbatches)
    whole = SCHEDULES[name](num_ranks, num_microbatches)
    rows = [[part for action in row for part in (_parts(action) if parts else [action])] for row in whole.actions]
    if parts == "late":
        rows = [sorted(row, key=lambda action: action.kind == "W") for row in rows]
    return replace(whole, actions=tuple(map(tuple, rows)))


def _parts(action: Action) -> list[Action]:
    return [replace(action, kind=kind) for kind in ("IW" if action.kind == "B" else action.kind)]


def placed(schedule: Schedule, placement: Placement) -> Schedule:
    """The same actions with the stages elsewhere, each rank's in the order in which they would run side by side."""
    sequence = [span.action for span in simulate(schedule).spans]
    return spread(schedule.name, schedule.num_microbatches, placement, sequence)


def schedules() -> list[str]:
    """Every schedule, its backwards whole and in parts, and evaluation."""
    whole = [name for name in SCHEDULES if any(action.kind == "B" for action in SCHEDULES[name](2, 2).actions[0])]
    return ["evaluation", *SCHEDULES, *(name + more for name in whole for more in ("+parts", "+late"))]


def valid_cases() -> Iterator[Case]:
    """Valid programs, small enough to be run in every interleaving."""
    for name in schedules():
        for num_ranks in (1, 2, 3, 4):
            for m in (1, 2, 3):
                schedule = schedule_of(name, num_ranks, m)
                if schedule.num_stages > 4 or (schedule.num_stages == 4 and m == 3):
                    continue
                others = [each for each in PLACEMENTS if len(each) == schedule.num_stages]
                for placement in dict.fromkeys([schedule.placement, *others]):
                    elsewhere = schedule if placement == schedule.placement else placed(schedule, placement)
                    yield from _cases(name, elsewhere)


def _cases(name: str, schedule: Schedule) -> Iterator[Case]:
    """A schedule in every world, with and without a first stage that needs no cotangent."""
    training = name != "evaluation"
    for first in (0, 1) if training and schedule.num_stages > 2 else (0,):
        cotangents = tuple(range(first + 1, schedule.num_stages)) if training else ()
        for lanes in get_args(Lanes):
            programs = lower(schedule, lanes, cotangents)
            for capacity in CAPACITIES:
                m = schedule.num_microbatches
                yield Case(name, schedule.placement, m, lanes, capacity, cotangents, training, programs)


def mutant(case: Case, change: Change, pick: random.Random) -> Case | None:
    """The case with one random change; None where there is nothing to change, or nothing would.

    Three of four stay on one rank: what comes to another is easily seen to be wrong.
    """
    programs = [list(program) for program in case.programs]
    rank = pick.randrange(len(programs))
    other = pick.choice([rank, rank, rank, pick.randrange(len(programs))])
    program = programs[rank]
    if not program:
        return None
    a = pick.randrange(len(program))
    match change:
        case "swap":
            b = pick.randrange(len(programs[other]))
            program[a], programs[other][b] = programs[other][b], program[a]
        case "drop":
            program.pop(a)
        case "double":
            programs[other].insert(pick.randint(0, len(programs[other])), program[a])
        case "move":
            moved = program.pop(a)
            programs[other].insert(pick.randint(0, len(programs[other])), moved)
    changed = replace(case, programs=tuple(programs))
    return None if changed.programs == case.programs else changed


def mutants(cases: Sequence[Case], number: int, pick: random.Random) -> Iterator[tuple[Change, Case]]:
    """Different mutants, the kinds in turn."""
    seen = set[str]()
    while len(seen) < number:
        change = CHANGES[len(seen) % len(CHANGES)]
        changed = mutant(pick.choice(cases), change, pick)
        if changed and (text := str(changed)) not in seen:
            seen.add(text)
            yield change, changed


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start, cases = time.perf_counter(), list(valid_cases())
    refused = [case for case in cases if not case.verify() or case.broken_by_definition()]
    print(f"{len(cases)} valid programs of {len(schedules())} schedules; {len(refused)} of them refused")
    counts, alone, wrong = Counter[tuple[Change, bool]](), Counter[str](), list[Case]()
    for change, case in mutants(cases, args.mutants, random.Random(args.seed)):
        is_right = case.broken_by_definition() is None
        counts[change, is_right] += 1
        broken = case.verify().broken
        if bool(broken) == is_right:
            wrong.append(case)
        if len(broken) == 1:
            alone.update(list(broken))
    report(counts, wrong, time.perf_counter() - start)
    print("rejected by one claim alone: " + ", ".join(f"{name} {number}" for name, number in alone.most_common()))
    for case in wrong[:3]:
        print(f"\n{case}definition: {case.broken_by_definition() or 'right'}\n{case.verify()}")
    if wrong or refused:
        raise SystemExit(1)


def report(counts: Counter[tuple[Change, bool]], wrong: Sequence[Case], seconds: float) -> None:
    """A row for each kind of change, and the score."""
    print(f"{'change':8}{'mutants':>9}{'wrong':>8}{'still right':>13}")
    for change in CHANGES:
        bad, good = counts[change, False], counts[change, True]
        print(f"{change:8}{bad + good:9}{bad:8}{good:13}")
    missed = [case for case in wrong if case.verify()]
    invalid = sum(number for (_, is_right), number in counts.items() if not is_right)
    valid = counts.total() - invalid
    score = 100 * (invalid - len(missed)) / invalid
    print(f"{counts.total()} mutants: {invalid - len(missed)} of {invalid} wrong ones rejected, score {score:.2f} %")
    print(f"{valid - len(wrong) + len(missed)} of {valid} that are still right accepted; {seconds:.0f} s")


if __name__ == "__main__":
    main()
