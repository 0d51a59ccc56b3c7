"""`pptrain plan`: how to train a model on given machines, or why that cannot be, before anything is loaded."""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
from mlx_lm.utils import _parse_size  # pyright: ignore[reportPrivateUsage]  # how mlx-lm reads 4GB

from pptrain.advice import Answer, Question, answer, same
from pptrain.config import TrainConfig, parse
from pptrain.errors import ConfigError
from pptrain.machine import look
from pptrain.microbatch import cross_entropy, kept_random_state
from pptrain.outline import outline
from pptrain.plan import RECOMPUTE, Machines, Option, seconds_at
from pptrain.profile import share, time_sites
from pptrain.recipe import make_optimizer, prepare_training
from pptrain.registry import SCHEDULES
from pptrain.segment import Cut
from pptrain.simulate import travel_time
from pptrain.sizes import Sizes, measure
from transports import LoopbackWorld, World, detect, open_world

_EPILOG = "All other options are those of pptrain train, such as --model, --batch-size, --max-seq-length, --config."
_CHOSEN = ("--stages", "--stages-per-rank", "--layers", "--schedule", "--microbatches", "--recompute")


def run(options: Sequence[str]) -> int:
    """Answer and print; 0 if something fits, and 2 if nothing does."""
    asked, rest = _parser().parse_known_args(options)
    config = parse(_without(rest, "--layers"), {"transport": "auto"})
    backend = detect() if asked.profile else None
    world = open_world(backend) if backend else LoopbackWorld(1)
    found = answer(_question(asked, config, rest, world))
    if 0 in world.local_ranks:
        command = _command(rest, config, found.recommended) if found.recommended else None
        print(
            json.dumps(_as_json(found, command)) if asked.json else "\n".join(lines(found, command, _assumed(asked))),
            flush=True,
        )
    return 0 if found.recommended else 2


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}. See pptrain plan --help.")


def _numbers(read: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    def of(text: str) -> tuple[float, ...]:
        try:
            values = tuple(float(read(part)) for part in text.split(","))
        except (ValueError, KeyError, ArithmeticError) as error:
            raise ConfigError(
                f"[plan] {text!r} is no number for each rank. Give them as 512GB,128GB or 28,14."
            ) from error
        if min(values) <= 0:
            raise ConfigError(f"[plan] {text!r} has a value that is not above 0. Give what each machine has.")
        return values

    return of


def _parser() -> ArgumentParser:
    about = "What a model takes on each machine, how it is cut best, and which schedule is the fastest that fits."
    parser = _Parser(prog="pptrain plan", description=about, epilog=_EPILOG, allow_abbrev=False)
    add = parser.add_argument
    add("--ranks", type=int, help="number of machines; by default as many as --memory lists, or as were launched")
    add("--memory", type=_numbers(_parse_size), help="memory of each, as 512GB,128GB; by default this machine's")
    add("--usable", type=float, default=0.75, help="share of the memory that training may use (default: 0.75)")
    add("--tflops", type=_numbers(float), default=(10.0,), help="speed of each in TFLOP/s, as 28,14 (default: 10)")
    add("--link-gbps", type=float, default=4.0, help="speed of the links in GB/s (default: 4, TCP over Thunderbolt 5)")
    add("--link-ms", type=float, default=0.5, help="latency of the links in ms (default: 0.5)")
    add(
        "--profile",
        action="store_true",
        help="time the layers here, and under pptrain launch on every rank, with links",
    )
    add("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _question(asked: Namespace, config: TrainConfig, rest: Sequence[str], world: World) -> Question:
    launched = world.world_size if world.world_size > 1 else None
    ranks = asked.ranks or config.stages or launched or len(asked.memory or (1,))
    listed = max(len(asked.memory or ()), len(asked.tflops))
    if ranks < listed:
        raise ConfigError(f"[plan] {ranks} ranks, but values for {listed} are listed. Give at most one for each rank.")
    cut, optimizer = outlined(config), make_optimizer(config)
    sizes_of = cache(lambda rows, seq: measure(cut, rows, seq, optimizer))
    return Question(
        sizes_of,
        _measured(asked, config, cut, sizes_of, world) if asked.profile else _described(asked),
        ranks,
        config.batch_size,
        config.microbatches or config.batch_size,
        config.max_seq_length,
        (config.schedule,) if "--schedule" in _names(rest) else tuple(SCHEDULES),
        (config.recompute,) if {"--recompute", "--grad-checkpoint"} & _names(rest) else RECOMPUTE,
    )


def outlined(config: TrainConfig) -> Cut:
    """The model that a config trains, as it is when training starts, without a weight."""
    with kept_random_state():
        model = outline(Path(config.model), config.trust_remote_code)
        model.train()
        prepare_training(model, config)
        return Cut.of(model, mx.zeros((1, 8), mx.int32), cross_entropy)


def _described(asked: Namespace) -> Callable[[Sizes, int], Machines]:
    memory = asked.memory or (look().memory_bytes,)

    def machines(sizes: Sizes, count: int) -> Machines:
        seconds = tuple(seconds_at(sizes, speed * 1e12) for speed in same(asked.tflops, count))
        return Machines(tuple(each * asked.usable for each in same(memory, count)), seconds, _link(asked, sizes))

    return machines


def _link(asked: Namespace, sizes: Sizes) -> float:
    return travel_time(_boundary(sizes), asked.link_ms / 1e3, asked.link_gbps * 1e9)


def _boundary(sizes: Sizes) -> int:
    return max(site.into_bytes for site in sizes.sites)


def _measured(
    asked: Namespace, config: TrainConfig, cut: Cut, sizes_of: Callable[[int, int], Sizes], world: World
) -> Callable[[Sizes, int], Machines]:
    """Machines as they are: timed for the microbatch asked for, and for others in proportion to their operations."""
    rows = -(-config.batch_size // (config.microbatches or config.batch_size))
    seq = config.max_seq_length
    timed = sizes_of(rows, seq)
    usable = look().usable_bytes
    seconds = time_sites(cut, timed, rows, seq)
    tasks = {rank: share(world.transport(rank), seconds, usable) for rank in world.local_ranks}
    table, memory, speeds = world.run(tasks)[world.local_ranks[0]]
    given = tuple(each * asked.usable for each in asked.memory) if asked.memory else memory

    def machines(sizes: Sizes, count: int) -> Machines:
        scale = _total_flops(sizes) / max(_total_flops(timed), 1)
        rates = [[(f * scale, i * scale, w * scale) for f, i, w in table[min(r, len(table) - 1)]] for r in range(count)]
        links: Any = {
            (each.source, each.to): travel_time(
                _boundary(sizes), each.latency_seconds, max(each.bytes_per_second.values())
            )
            for each in speeds
        }
        link = links if links and count == len(table) else _link(asked, sizes)
        return Machines(same(given, count), tuple(map(tuple, rates)), link)

    return machines


def _total_flops(sizes: Sizes) -> int:
    return sum(site.parts.forward_flops for site in sizes.sites)


# -- what is printed ---------------------------------------------------------------------------------------------------


def _names(rest: Sequence[str]) -> set[str]:
    return {word.split("=")[0] for word in rest}


def _without(rest: Sequence[str], *names: str) -> list[str]:
    """Arguments but some, and their values."""
    kept, skip = list[str](), False
    for word in rest:
        if skip:
            skip = False
        elif word.split("=")[0] in names:
            skip = "=" not in word
        else:
            kept.append(word)
    return kept


def _command(rest: Sequence[str], config: TrainConfig, chosen: Option) -> str:
    """What to run; what was chosen stands behind what was given."""
    given = _without(rest, *_CHOSEN, *(["--model"] if config.model.endswith(".json") else []))
    if config.model.endswith(".json"):
        given = ["--model", str(Path(config.model).parent), *given]
    each = len(chosen.layers) // len(chosen.ranks)
    words = ["pptrain", "train", *given, "--layers", ",".join(map(str, chosen.layers)), "--schedule", chosen.schedule]
    words += ["--stages-per-rank", str(each)] if chosen.schedule == "interleaved" and each != 2 else []
    words += ["--microbatches", str(chosen.num_microbatches)]
    words += ["--recompute", chosen.recompute] if chosen.recompute != "none" else []
    launched = ["pptrain", "launch", "--hostfile", "hosts.json", "--backend", "ring", "--"]
    return shlex.join(launched + words if len(chosen.ranks) > 1 else words)


def _as_json(found: Answer, command: str | None) -> dict[str, Any]:
    def as_dict(one: Option) -> dict[str, Any]:
        ranks = [{**asdict(rank), "total": rank.total} for rank in one.ranks]
        return {**asdict(one), "fits": one.fits, "ranks": ranks}

    return {
        "fits": found.recommended is not None,
        "command": command,
        "chosen": as_dict(found.closest),
        "options": [as_dict(one) for one in found.options],
        "remedies": list(found.remedies),
    }


def lines(found: Answer, command: str | None, assumed: str) -> list[str]:
    """The answer as text: a table of ranks, a table of schedules, a sentence."""
    return [*_rank_lines(found.closest), "", *_schedule_lines(found), assumed, "", *_verdict(found, command)]


def _assumed(asked: Namespace) -> str:
    if asked.profile:
        return "Times: measured here, layer kind by layer kind."
    speeds = ", ".join(f"{speed:g}" for speed in asked.tflops)
    links = f"links of {asked.link_gbps:g} GB/s and {asked.link_ms:g} ms"
    return f"Times: at {speeds} TFLOP/s a rank and {links} (--tflops, --link-gbps, --link-ms; --profile measures them)."


def _rank_lines(chosen: Option) -> list[str]:
    title = f"{chosen.schedule}, recompute {chosen.recompute}, {chosen.num_microbatches} microbatches; GB of each rank"
    columns = ("weights", "gradients", "optimizer", "residuals", "boundaries", "working", "total")
    head = f"{'rank':<6}{'layers':<12}" + "".join(f"{name:>11}" for name in columns) + f"{'usable':>9}"
    rows = [
        f"{rank.rank:<6}{','.join(map(str, rank.layers)):<12}"
        + "".join(f"{_gb(getattr(rank, name)):>11}" for name in columns)
        + f"{_gb(rank.limit):>9}"
        + ("" if rank.total <= rank.limit else "  too much")
        for rank in chosen.ranks
    ]
    return [title, head, *rows]


def _schedule_lines(found: Answer) -> list[str]:
    head = f"{'schedule':<13}{'bubble':>7}{'step':>11}{'fullest rank':>22}  layers"
    rows = [
        f"{one.schedule:<13}{one.bubble:>7.1%}{one.step_seconds:>9.2f} s{_full(one):>22}"
        f"  {','.join(map(str, one.layers))}" + ("" if one.is_balanced else "  (even)")
        for one in found.options
    ]
    return [head, *rows]


def _full(one: Option) -> str:
    rank = one.fullest
    return f"{_gb(rank.total)} of {_gb(rank.limit)} GB"


def _verdict(found: Answer, command: str | None) -> list[str]:
    chosen = found.closest
    if command is not None:
        step = f"a step takes {chosen.step_seconds:.2f} s, {chosen.bubble:.1%} of it bubble"
        return [f"It fits, and {chosen.schedule} is the fastest: {step}. Run:", f"  {command}"]
    rank = chosen.fullest
    lacks = f"rank {rank.rank} lacks {_gb(rank.total - rank.limit)} GB"
    no = f"It does not fit: even with {chosen.schedule} and --recompute {chosen.recompute}, {lacks}."
    if not found.remedies:
        return [no, "Nothing that was tried helps: neither shorter rows, smaller batches nor 8 more ranks."]
    return [no, "Each of these would make it fit:", *(f"  {remedy}" for remedy in found.remedies)]


def _gb(count: float) -> str:
    return f"{count / 1e9:,.2f}"
