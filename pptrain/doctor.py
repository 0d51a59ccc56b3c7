"""`pptrain doctor`: what this machine is, and under `mlx.launch` whether its links keep what training relies on.

Only the first rank prints to stdout. A rank that finds a broken promise says so on stderr and ends, and then so do the
others: a transport is not used after its first error.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from pptrain.agreement import exchange
from pptrain.checks import check
from pptrain.errors import ConfigError
from pptrain.machine import Backend, Machine, backends, look, matrix_product_rate
from transports import Lanes, Task, Transport, TransportError, World, detect, open_world
from transports.contract import MIB, PROMISES, ContractBroken, Promise, in_one_run
from transports.endings import ENDINGS
from transports.measure import SIZES, LinkSpeed, measure_links

_COMPUTE = (mx.float32, mx.bfloat16)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a promise."""

    promise: str
    result: str
    """`kept`, `broken`, or `left out`."""
    why: str = ""
    exit_code: int = 1
    """What the doctor ends with where this is what was broken first."""

    @classmethod
    def broken(cls, promise: str, error: ContractBroken | TransportError) -> Outcome:
        """A promise that an error has ended."""
        code = error.exit_code if isinstance(error, TransportError) else 1
        return cls(promise, "broken", f"{type(error).__name__}: {error}", code)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank knows of itself."""

    machine: Machine
    backends: list[Backend]
    warnings: list[str]

    @classmethod
    def look(cls) -> Facts:
        """Of this process."""
        return cls(look(), backends(), warnings(os.environ))

    @classmethod
    def read(cls, told: dict[str, Any]) -> Facts:
        """Of another rank, as `asdict` makes it."""
        return cls(Machine(**told["machine"]), [Backend(**each) for each in told["backends"]], told["warnings"])


@dataclass(frozen=True, slots=True)
class Links:
    """What the ranks found out together."""

    backend: str
    lanes: Lanes
    world_size: int
    outcomes: list[Outcome]
    speeds: list[LinkSpeed] = field(default_factory=list[LinkSpeed])
    compute: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """Of each rank, floating-point operations a second by dtype."""
    facts: list[Facts] = field(default_factory=list[Facts])
    """Of each rank; nothing if a promise is broken, since a rank then hears nothing of the others."""

    @property
    def broken(self) -> list[Outcome]:
        """The promises that were not kept."""
        return [outcome for outcome in self.outcomes if outcome.result == "broken"]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the doctor has to say."""

    ranks: list[Facts]
    """Of each rank that was heard of; of this machine, if it was looked at alone."""
    warnings: list[str]
    links: Links | None
    verdict: str

    @classmethod
    def of(cls, links: Links | None) -> Report:
        """What this process has found out."""
        ranks = (links.facts if links else []) or [Facts.look()]
        told = [f"{_of_rank(rank, ranks)}{text}" for rank, facts in enumerate(ranks) for text in facts.warnings]
        return cls(ranks, told + differences(ranks), links, verdict(links))


def run(options: Sequence[str]) -> int:
    """Examine, print, and return the exit code: if a promise is broken that of its error, as for `pptrain train`."""
    asked = _parse(options)
    backend = detect()
    if backend is None:
        _print(Report.of(None), asked.json)
        return 0
    world = open_world(backend, lanes=asked.lanes, check_messages=asked.check_messages, timeout_seconds=asked.timeout)
    links = examine(world, backend, quick=asked.quick, heavy=asked.heavy)
    if world.local_ranks[0] == 0:
        _print(Report.of(links), asked.json)
    elif links.broken:
        rank, outcome = world.local_ranks[0], links.broken[0]
        print(f"[rank {rank}] {outcome.promise} is broken: {outcome.why}", file=sys.stderr, flush=True)
    return links.broken[0].exit_code if links.broken else 0


def examine(world: World, backend: str, *, quick: bool = False, heavy: bool = False) -> Links:
    """Check the contract and measure the links; ends at the first broken promise.

    Args:
        world: Whose links, and this process's ranks of it.
        backend: What it was opened as.
        quick: Leave out what sends more than 1 MB at once.
        heavy: Also send more than 2 GiB at once.
    """
    transport = world.transport(world.local_ranks[0])
    chosen = choose(transport, quick=quick, heavy=heavy)
    links = Links(backend, transport.lanes, world.world_size, _left_out(transport, chosen))
    links.outcomes.extend(_check(world, [promise for promise in chosen if not promise.closes]))
    if not links.broken:
        _measure(world, links, [MIB] if quick else SIZES)
    if not links.broken:
        links.outcomes.extend(_check(world, [promise for promise in chosen if promise.closes]))
    order = {promise.name: place for place, promise in enumerate((*PROMISES, *ENDINGS))}
    links.outcomes.sort(key=lambda outcome: order.get(outcome.promise, len(order)))
    return links


def choose(transport: Transport, *, quick: bool, heavy: bool) -> list[Promise]:
    """The promises to check one after another, in the contract's order."""
    together = in_one_run(transport)
    wanted = [promise for promise in PROMISES if promise in together or (heavy and promise.is_heavy)]
    return [promise for promise in wanted if not (quick and promise.is_large)]


def why_left_out(promise: Promise, transport: Transport) -> str:
    """The reason why a promise was not checked."""
    if promise.is_of_checks and not transport.checks_messages:
        return "this transport does not check messages"
    if not promise.concerns(transport):
        return f"speaks of {promise.lanes} lanes, and these are {transport.lanes}"
    if promise.closes:
        return "ends the run that checks it, and is checked by the tests"
    if promise.is_heavy:
        return f"sends {promise.message_bytes / 2**30:.0f} GiB at once and needs four times that: ask for --heavy"
    return f"sends {promise.message_bytes // MIB} MB at once, and --quick was asked for"


def verdict(links: Links | None) -> str:
    """What it all means, in a sentence."""
    if links is None:
        return (
            "This machine was looked at alone; to check the links to others, start the same command on all of them: "
            "mlx.launch --hostfile hosts.json -- pptrain doctor"
        )
    if links.broken:
        return f"Do not train over these links: {links.broken[0].promise} is broken ({links.broken[0].why})."
    kept = sum(outcome.result == "kept" for outcome in links.outcomes)
    size = max(links.speeds[0].bytes_per_second)
    slowest = min(links.speeds, key=lambda speed: speed.bytes_per_second[size])
    link, rate = f"from rank {slowest.source} to rank {slowest.to}", slowest.bytes_per_second[size] / 1e9
    return (
        f"All {kept} promises that were checked hold over {links.backend} between {links.world_size} ranks; "
        f"the slowest link, {link}, carries {rate:.2f} GB/s in messages of {size // MIB} MB."
    )


def warnings(environ: Mapping[str, str]) -> list[str]:
    """What in the environment is known to do harm."""
    if environ.get("MLX_METAL_FAST_SYNCH", "0") not in ("", "0"):
        return ["MLX_METAL_FAST_SYNCH is set: with it deadlocks were reported. Unset it."]
    return []


def differences(ranks: Sequence[Facts]) -> list[str]:
    """What is not the same on all ranks and should be, or should be known."""
    lines = list[str]()
    for name, of, advice in _COMPARED:
        values = [of(facts.machine) for facts in ranks]
        if len(set(values)) > 1:
            which = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            lines.append(f"{name} differs: {which}. {advice}")
    return lines


_COMPARED: Sequence[tuple[str, Callable[[Machine], str], str]] = [
    ("system", lambda machine: machine.system, "Train, but look here first if ranks differ in what they do."),
    (
        "size of RDMA frames",
        lambda machine: machine.rdma_class,
        "JACCL refuses it: bring all to macOS 26.3 or newer.",
    ),
    ("chip", lambda machine: machine.chip, "Give each the layers that it has time for: pptrain plan --profile."),
    *(
        (name, lambda machine, name=name: machine.versions[name], "Install the same version on all.")
        for name in ("python", "mlx", "mlx-lm", "pptrain")
    ),
]
"""What is compared, and what to do where it differs."""


def _of_rank(rank: int, ranks: Sequence[Facts]) -> str:
    return f"rank {rank}: " if len(ranks) > 1 else ""


def _left_out(transport: Transport, chosen: Sequence[Promise]) -> list[Outcome]:
    others = [(promise.name, why_left_out(promise, transport)) for promise in PROMISES if promise not in chosen]
    others += [(ending.name, "needs a rank to end, and is checked by the tests") for ending in ENDINGS]
    return [Outcome(name, "left out", why) for name, why in others]


def _check(world: World, promises: Sequence[Promise]) -> list[Outcome]:
    """Check promises one after another, until one is broken."""
    outcomes: list[Outcome] = []
    for index, promise in enumerate(promises):
        try:
            world.run({rank: promise.check(world.transport(rank)) for rank in world.local_ranks})
        except (ContractBroken, TransportError) as error:
            because = f"not checked after {promise.name} was broken"
            outcomes.append(Outcome.broken(promise.name, error))
            return outcomes + [Outcome(later.name, "left out", because) for later in promises[index + 1 :]]
        outcomes.append(Outcome(promise.name, "kept"))
    return outcomes


def _measure(world: World, links: Links, sizes: Sequence[int]) -> None:
    tasks = {rank: _measured(world.transport(rank), sizes) for rank in world.local_ranks}
    try:
        speeds, compute, facts = world.run(tasks)[world.local_ranks[0]]
    except TransportError as error:
        links.outcomes.append(Outcome.broken("lasts_while_it_is_measured", error))
        return
    links.speeds.extend(speeds)
    links.compute.extend(compute)
    links.facts.extend(facts)


def _measured(
    transport: Transport, sizes: Sequence[int]
) -> Task[tuple[list[LinkSpeed], list[dict[str, float]], list[Facts]]]:
    told = yield from exchange(transport, asdict(Facts.look()))
    speeds = yield from measure_links(transport, sizes)
    rates = np.zeros((transport.world_size, len(_COMPUTE)), np.float32)
    rates[transport.rank] = [matrix_product_rate(dtype) for dtype in _COMPUTE]
    gathered = transport.all_sum(mx.array(rates), "compute")
    yield gathered
    names = [str(dtype).removeprefix("mlx.core.") for dtype in _COMPUTE]
    table: list[list[float]] = np.asarray(gathered.array).tolist()
    return speeds, [dict(zip(names, row, strict=True)) for row in table], [Facts.read(each) for each in told]


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}. See pptrain doctor --help.")


def _parse(options: Sequence[str]) -> Namespace:
    about = "What this machine is, and under mlx.launch whether its links keep what training relies on."
    parser = _Parser(prog="pptrain doctor", description=about, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quick", action="store_true", help="leave out what sends more than 1 MB at once")
    parser.add_argument("--heavy", action="store_true", help="also send 2 GiB at once; takes 8 GiB of memory a rank")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for a single wait; 60 if left out")
    parser.add_argument("--check-messages", action="store_true", help="send a header before each message, checked")
    parser.add_argument("--lanes", choices=["single", "directional"], help="as the transport does it, if left out")
    asked = parser.parse_args(options)
    check("--timeout", asked.timeout, float, {"above": 0})
    return asked


def _print(report: Report, as_json: bool) -> None:
    print(json.dumps(asdict(report)) if as_json else "\n".join(lines(report)), flush=True)


def lines(report: Report) -> list[str]:
    """The report as text."""
    blocks = [_machine_lines([facts.machine for facts in report.ranks]), _backend_lines(report.ranks)]
    if report.links is not None:
        blocks += [_contract_lines(report.links), _speed_lines(report.links), _compute_lines(report.links)]
    blocks += [[f"warning    {warning}" for warning in report.warnings], [f"verdict    {report.verdict}"]]
    return [line for block in blocks if block for line in (*block, "")][:-1]


def _machine_lines(machines: Sequence[Machine]) -> list[str]:
    """A column for each rank."""
    heads = [f"rank {rank}" for rank in range(len(machines))] if len(machines) > 1 else [""]
    columns = [[head, *_machine_cells(machine)] for head, machine in zip(heads, machines, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    names = ["", "machine", "chip", "memory", *machines[0].versions]
    rows = [
        f"{name:<10} " + "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
        for name, *cells in zip(names, *columns, strict=True)
    ]
    return rows if len(machines) > 1 else rows[1:]


def _machine_cells(machine: Machine) -> list[str]:
    wired = machine.wired_limit_bytes
    limit = "no wired limit on this system" if wired is None else f"wired limit {_gib(wired)}"
    return [
        machine.system,
        f"{machine.chip}, MLX computes on its {machine.device}",
        f"{_gib(machine.memory_bytes)}, {limit}",
        *machine.versions.values(),
    ]


def _backend_lines(ranks: Sequence[Facts]) -> list[str]:
    """Every backend of the first rank, and of another one where it is another there."""
    says = list[str]()
    for rank, facts in enumerate(ranks):
        for backend, first in zip(facts.backends, ranks[0].backends, strict=True):
            if rank == 0 or backend != first:
                where = "" if rank == 0 else f" on rank {rank}"
                why = "yes" if backend.is_available else f"no: {backend.why_not}. {backend.what_to_do}"
                says.append(f"{backend.name + where:<9} {why}")
    return [f"{'transports' if index == 0 else '':<10} {line}" for index, line in enumerate(says)]


def _contract_lines(links: Links) -> list[str]:
    title = f"contract   {links.backend}, {links.world_size} ranks, {links.lanes} lanes"
    body = [f"  {o.result:<9} {o.promise}" + (f": {o.why}" if o.why else "") for o in links.outcomes]
    return [title, *body]


def _speed_lines(links: Links) -> list[str]:
    if not links.speeds:
        return []
    sizes = list(links.speeds[0].bytes_per_second)
    head = "links      from  to    latency" + "".join(f"{f'{size // MIB} MB':>12}" for size in sizes)
    rows = [
        f"           {each.source:>4}{each.to:>4}{each.latency_seconds * 1e3:>8.3f} ms"
        + "".join(f"{rate / 1e9:>7.2f} GB/s" for rate in each.bytes_per_second.values())
        for each in links.speeds
    ]
    return [head, *rows]


def _compute_lines(links: Links) -> list[str]:
    says = [
        f"rank {rank}: " + ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in rates.items())
        for rank, rates in enumerate(links.compute)
    ]
    return [f"{'compute' if index == 0 else '':<10} {line}" for index, line in enumerate(says)]


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
