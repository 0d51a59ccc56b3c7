"""`pptrain schedule`: a schedule on paper: drawn, timed, proven, exported, or a file checked."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pptrain.auto import auto
from pptrain.errors import ConfigError, ScheduleError
from pptrain.lowered import makespan, time_program
from pptrain.notation import parse_program, placement_of, program_to_csv, read_schedule
from pptrain.perfetto import chrome_trace
from pptrain.program import Program, lower
from pptrain.promela import promela
from pptrain.registry import SCHEDULES, find_schedule
from pptrain.schedule import Action, Placement, Schedule, loop
from pptrain.simulate import Costs, Span, Timing, simulate
from pptrain.svg import draw_svg
from pptrain.timeline import draw
from pptrain.verify import Verdicts, verify
from transports import Lanes

_CAPACITIES: dict[str, int | None] = {"0": 0, "1": 1, "unbounded": None}
_LANES: dict[str, Lanes] = {"single": "single", "direction": "directional"}


@dataclass(frozen=True, slots=True)
class Shown:
    """A schedule with all that is said of it."""

    schedule: Schedule
    timing: Timing
    lanes: Lanes
    programs: tuple[Program, ...]
    verdicts: dict[str, Verdicts]
    """By the capacity of the links."""

    @property
    def is_proven(self) -> bool:
        """Whether every claim holds for every capacity that was asked about."""
        return all(self.verdicts.values())


def run(argv: Sequence[str]) -> int:
    """The command; returns 0, or 1 if what was checked is not right.

    Raises:
        UserError: A mistake in what was asked for.
    """
    options = _parser().parse_args(argv)
    if options.check:
        return _check(options)
    if options.compare:
        print(_comparison(options))
        return 0
    shown = _shown(_schedule(options), options)
    _export(shown, options)
    print(json.dumps(as_json(shown, options.stages), indent=2) if options.json else as_text(shown))
    return 0 if shown.is_proven else 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser("pptrain schedule", description=__doc__)
    parser.add_argument("name", nargs="?", help=f"{', '.join(SCHEDULES)}, auto, or a CSV file of actions")
    parser.add_argument("--stages", type=int, default=4, help="ranks' worth of stages (default 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="default 8")
    parser.add_argument("--virtual", type=int, help="stages a rank, for interleaved")
    parser.add_argument("--costs", help="F,I,W,COMM: what each part of one rank's work takes, and a message (1,1,1,0)")
    parser.add_argument("--residual-limit", type=int, help="microbatches whose residuals a rank may keep")
    parser.add_argument(
        "--weight-share",
        type=float,
        default=1.0,
        help="for auto: what is left of a microbatch's residuals between its input part and its weight part (1, all; "
        "Qi et al. count 32 / (34 + 5 heads * seq / hidden)); the verifier counts them whole",
    )
    parser.add_argument("--lanes", choices=_LANES, default="single", help="how messages travel (default single)")
    parser.add_argument("--csv", type=Path, help="write the schedule, in PyTorch's notation")
    parser.add_argument("--program", type=Path, help="write the same with sends and receives")
    parser.add_argument("--promela", type=Path, help="write the program as a model for SPIN, links of --capacity")
    parser.add_argument("--svg", type=Path, help="write a picture")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace, for Perfetto; a unit of the costs is 1 ms")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument("--check", type=Path, metavar="FILE", help="verify a CSV file; ends with 1 if it is wrong")
    parser.add_argument("--capacity", default="0", help="messages that a link holds: 0 (default), 1, ..., unbounded")
    parser.add_argument("--compare", action="store_true", help="all schedules as one table")
    return parser


# -- what is shown -----------------------------------------------------------------------------------------------------


def _schedule(options: Namespace) -> Schedule:
    name, costs = options.name, _costs(options.costs, 1)
    if name is None:
        raise ConfigError(f"[schedule] No schedule is named. Expected one of {', '.join(SCHEDULES)}, auto, or a file.")
    if name.endswith(".csv"):
        return read_schedule(_text(Path(name)), Path(name).stem)
    if name == "auto":
        if options.residual_limit is None:
            raise ConfigError("[residual-limit] auto searches within a limit. Give --residual-limit, such as --stages.")
        placement, share = loop(options.stages), options.weight_share
        return auto(placement, options.microbatches, costs, options.residual_limit, share)
    return find_schedule(name, options.virtual)(options.stages, options.microbatches)


def _shown(schedule: Schedule, options: Namespace) -> Shown:
    lanes = _LANES[options.lanes]
    each = max(1, schedule.num_stages // schedule.num_ranks)
    programs = lower(schedule, lanes, range(1, schedule.num_stages))
    verdicts = {
        name: verify(
            programs,
            schedule.placement,
            schedule.num_microbatches,
            capacity=capacity,
            lanes=lanes,
            residual_limit=options.residual_limit if options.weight_share == 1 else None,
        )
        for name, capacity in _CAPACITIES.items()
    }
    return Shown(schedule, simulate(schedule, _costs(options.costs, each)), lanes, programs, verdicts)


def _costs(text: str | None, stages_per_rank: int) -> Costs:
    """A rank's work is shared by its stages."""
    try:
        forward, inputs, weights, link = (float(part) for part in (text or "1,1,1,0").split(","))
    except ValueError as error:
        raise ConfigError(f"[costs] {text!r} is not F,I,W,COMM. Expected four numbers, as 18.5,18,9.3,0.6.") from error
    if min(forward, inputs, weights) <= 0 or link < 0:
        raise ConfigError(f"[costs] {text!r} has a negative cost. Expected F, I and W above 0, COMM of at least 0.")
    each = {"F": forward / stages_per_rank, "I": inputs / stages_per_rank, "W": weights / stages_per_rank}
    return Costs(each, link)  # type: ignore[arg-type]


def as_json(shown: Shown, num_stages: int) -> dict[str, Any]:
    """All of it under the names of the documentation; `num_stages` counts ranks' worth, as `--stages` does."""
    schedule, timing, strictest = shown.schedule, shown.timing, shown.verdicts["0"]
    return {
        "schedule": schedule.name,
        "num_stages": num_stages if schedule.num_ranks == num_stages else schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "placement": list(schedule.placement),
        "makespan": timing.makespan,
        "span": timing.longest_span,
        "bubble": timing.bubble,
        "lowered_makespan": _lowered_makespan(shown),
        "residual_peaks": list(timing.most_residuals),
        "actions": [[str(action) for action in row] for row in schedule.actions],
        "program": [[str(instruction) for instruction in program] for program in shown.programs],
        "verdicts": {
            **{name: bool(getattr(strictest, name)) for name in ("complete", "ordered", "matched", "order_consistent")},
            "deadlock_free": {name: bool(verdicts.deadlock_free) for name, verdicts in shown.verdicts.items()},
            "within_limit": bool(strictest.within_limit),
            "filled_once": bool(strictest.filled_once),
        },
    }


def as_text(shown: Shown) -> str:
    """The timeline, what it costs, and the verdicts."""
    schedule, timing = shown.schedule, shown.timing
    lowered = _lowered_makespan(shown)
    lines = [
        f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches\n",
        draw(schedule),
        f"\nbubble {timing.bubble:.2%}   longest span {timing.longest_span:g}   makespan {timing.makespan:g}",
        f"residual peaks {' '.join(map(str, timing.most_residuals))} (stages times microbatches, by rank)",
        f"with sends and receives, {'one lane a rank' if shown.lanes == 'single' else 'a lane in each direction'}: "
        + ("cannot run" if lowered is None else f"makespan {lowered:g}"),
        "",
        *_verdict_lines(shown.verdicts),
    ]
    return "\n".join(lines)


def _verdict_lines(verdicts: dict[str, Verdicts]) -> list[str]:
    strictest = next(iter(verdicts.values()))
    names = ("complete", "ordered", "matched", "order_consistent", "within_limit", "filled_once")
    lines = [f"{name.replace('_', ' '):<34}{getattr(strictest, name)}" for name in names]
    return lines + [f"{f'no deadlock, links of {c}':<34}{v.deadlock_free}" for c, v in verdicts.items()]


def _lowered_makespan(shown: Shown) -> float | None:
    """None where the program cannot run so."""
    try:
        return makespan(time_program(shown.programs, shown.timing.costs, shown.lanes))
    except ScheduleError:
        return None


# -- files -------------------------------------------------------------------------------------------------------------


def _export(shown: Shown, options: Namespace) -> None:
    schedule, timing = shown.schedule, shown.timing
    rows: dict[int, list[Span]] = {rank: [] for rank in range(schedule.num_ranks)}
    for span in timing.spans:
        rows[schedule.placement[span.action.stage]].append(span)
    title = f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
    texts = {
        options.csv: lambda: program_to_csv(schedule.actions),
        options.program: lambda: program_to_csv(shown.programs),
        options.promela: lambda: promela(
            shown.programs,
            schedule.placement,
            schedule.num_microbatches,
            capacity=_capacity(options.capacity),
            lanes=shown.lanes,
        ),
        options.svg: lambda: draw_svg(rows, f"{title}, bubble {timing.bubble:.1%}"),
        options.trace: lambda: chrome_trace(rows, seconds=1e-3),
    }
    for path, text in texts.items():
        if path is not None:
            _write(path, text())


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"[{path}] Cannot be written: {error.strerror}. Expected a file in a directory.") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"[{path}] Cannot be read: {error}. Expected a CSV file with one row a rank.") from error


def _capacity(text: str) -> int | None:
    if text == "unbounded":
        return None
    if not text.isdecimal():
        raise ConfigError(f"[capacity] {text!r} is no capacity. Expected 0, 1, 2, ... or unbounded.")
    return int(text)


# -- checking and comparing --------------------------------------------------------------------------------------------


def _check(options: Namespace) -> int:
    programs = parse_program(_text(options.check))
    placement = placement_of(programs)
    lanes, capacity = _LANES[options.lanes], _capacity(options.capacity)
    if len(programs) > 1 and all(isinstance(i, Action) for program in programs for i in program):
        programs = _lowered(options.check, lanes, placement)
    verdicts = verify(programs, placement, capacity=capacity, lanes=lanes, residual_limit=options.residual_limit)
    print("\n".join(_verdict_lines({options.capacity: verdicts})))
    return 0 if verdicts else 1


def _lowered(path: Path, lanes: Lanes, placement: Placement) -> tuple[Program, ...]:
    print("There is no send or receive in the file: it is a schedule, and checked with those that pptrain puts in.\n")
    return lower(read_schedule(_text(path)), lanes, range(1, len(placement)))


def _comparison(options: Namespace) -> str:
    lines = ["| schedule | stages a rank | bubble | longest span | residual peaks | one lane | a lane each way |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name in SCHEDULES:
        schedule = find_schedule(name)(options.stages, options.microbatches)
        each = schedule.num_stages // schedule.num_ranks
        costs = _costs(options.costs, each)
        timing = simulate(schedule, costs)
        lowered = [
            f"{makespan(time_program(lower(schedule, lanes, range(1, schedule.num_stages)), costs, lanes)):g}"
            for lanes in _LANES.values()
        ]
        peaks = " ".join(f"{peak / each:g}" for peak in timing.most_residuals)
        cells = [name, str(each), f"{timing.bubble:.2%}", f"{timing.longest_span:g}", peaks, *lowered]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("\nResidual peaks by rank, in whole microbatches; the last two columns are makespans with messages.")
    return "\n".join(lines)
