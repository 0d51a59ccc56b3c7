"""`pptrain validate`: its options, its processes and what it prints.

With several targets each has a process of its own: a model's native code may end the process that runs it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import mlx.core as mx
from mlx_lm.convert import QUANT_RECIPES

from pptrain.errors import ConfigError, SaveError, UserError
from pptrain.microbatch import kept_random_state
from pptrain.partition import even, explicit
from pptrain.pattern import FEWEST, MOST
from pptrain.quantization import MODES, as_converted
from pptrain.target import Target, every_name, find_target, is_class, refuse_ignored
from pptrain.trace import count_layers
from pptrain.validate import Plan, Variant, Verdict, validate
from pptrain.verdicts import from_json, line, summary, to_html, to_json, to_junit


def run(options: Sequence[str]) -> int:
    """Validate; returns 0 if no model is `close` or cannot be cut, else 1."""
    asked = _parser().parse_args(options)
    names = [*asked.targets, *(every_name() if asked.all else [])]
    if not names:
        raise ConfigError(
            "[target] Nothing to validate. Expected a model, for example `qwen3_moe`, or --all. Name one."
        )
    _check_stages(asked)
    refuse_ignored(names, asked.num_layers, asked.full_size, asked.config)
    _refuse_unwritable(asked)
    for name in asked.targets if len(names) > 1 else ():  # a wrong name is a mistake, not a verdict of its process
        _find(name, asked)
    found = dict[int, Verdict]()
    try:
        if len(names) == 1:
            found[0] = _here(names[0], asked)
        else:
            _each_in_a_process(names, asked, found)
    finally:  # what was found is told when the rest is interrupted, too
        if found:
            _tell([found[at] for at in sorted(found)], len(names), asked)
    return 0 if all(verdict.is_good for verdict in found.values()) else 1


def _tell(verdicts: Sequence[Verdict], num_models: int, asked: argparse.Namespace) -> None:
    """Print how many of which verdict there are, and write them to files.

    Raises:
        SaveError: If a file cannot be written; the others are.
    """
    missing = num_models - len(verdicts)
    if num_models > 1:
        print(summary(verdicts) + (f"; {missing} not tried" if missing else ""), flush=True)
    faults = list[str]()
    for flag, write in (("json", to_json), ("junit", to_junit), ("html", to_html)):
        path: Path | None = getattr(asked, flag)
        try:
            if path is not None:
                path.write_text(write(verdicts), encoding="utf-8")
        except OSError as error:
            faults.append(
                f"[{flag}] Cannot write {path}: {error.strerror}. Expected room for it. The verdicts are above."
            )
    if faults:
        raise SaveError("\n".join(faults))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}. See pptrain validate --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pptrain validate",
        description="Compare every cut of a tiny model of an architecture with one device, bit by bit.",
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=_TARGETS)
    parser.add_argument("--all", action="store_true", help="every model of the installed mlx-lm")
    parser.add_argument("--stages", type=_counts("stages"), help="numbers of stages to cut into (default 2,3)")
    parser.add_argument("--layers", type=_counts("layers"), help="one cut instead of all: layers of each stage, as 1,3")
    parser.add_argument("--num-layers", type=_count("num-layers"), help=_NUM_LAYERS)
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config.json to call module:Class with")
    parser.add_argument("--full-size", action="store_true", help="a config's real sizes instead of tiny ones")
    parser.add_argument(
        "--quick", action="store_true", help="each cut in one way of each variant, the ways taking turns"
    )
    parser.add_argument("--variants", type=_variants, default=("full", "lora", "qlora"), help="of full,lora,qlora")
    base = parser.add_mutually_exclusive_group()
    base.add_argument("--q-bits", type=int, choices=(2, 3, 4, 5, 6, 8), help=f"bits {_OF_BASE} (default 4)")
    base.add_argument("--q-mode", choices=tuple(MODES), help=f"mode {_OF_BASE} (default affine)")
    base.add_argument("--quant-predicate", choices=QUANT_RECIPES, help=f"mixed bits {_OF_BASE}")
    parser.add_argument("--jobs", type=_count("jobs"), default=os.cpu_count() or 1, help="models at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the verdicts as JUnit XML")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the verdicts as one page")
    return parser


_TARGETS = "a model directory, a config.json, a model type (qwen3_moe), module:Class, or a name on the hub"


_OF_BASE = "of qlora's base, as mlx_lm.convert makes it, where no config says them"


_NUM_LAYERS = (
    "layers of the tiny model (default: as many as show the pattern of layers twice, with what comes before and after "
    f"it, from {FEWEST} to {MOST})"
)


def _counts(where: str) -> Callable[[str], tuple[int, ...]]:
    def of(text: str) -> tuple[int, ...]:
        parts = text.split(",")
        if not all(part.strip().isdecimal() and int(part) for part in parts):
            raise ConfigError(f"[{where}] {text!r} was given. Expected whole numbers of at least 1, for example 2,3.")
        return tuple(map(int, parts))

    return of


def _count(where: str) -> Callable[[str], int]:
    def of(text: str) -> int:
        count, *others = _counts(where)(text)
        if others:
            raise ConfigError(f"[{where}] {text!r} was given. Expected one number. For a cut use --layers.")
        return count

    return of


def _variants(text: str) -> tuple[Variant, ...]:
    known: dict[str, Variant] = {"full": "full", "lora": "lora", "qlora": "qlora"}
    try:
        return tuple(dict.fromkeys(known[part] for part in text.split(",")))
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"unknown variant {error}; expected some of full,lora,qlora") from None


def _check_stages(asked: argparse.Namespace) -> None:
    if asked.layers and asked.stages and len(asked.layers) not in asked.stages:
        explicit(sum(asked.layers), asked.layers, asked.stages[0])


def _refuse_unwritable(asked: argparse.Namespace) -> None:
    given = {flag: path for flag in ("json", "junit", "html") if (path := getattr(asked, flag)) is not None}
    if len({path.absolute() for path in given.values()}) < len(given):
        raise ConfigError(
            f"[{'|'.join(given)}] Of {', '.join(map(str, given.values()))} two are one file. Expected a file for each. "
            "Give another name."
        )
    for flag, path in given.items():
        if os.path.isdir(path):  # unlike the path's own method, it takes any name
            raise ConfigError(f"[{flag}] {path} is a directory. Expected a file to write. Give a name in it.")
        if not os.path.isdir(path.absolute().parent):
            raise ConfigError(f"[{flag}] There is no directory {path.parent} to write {path.name} in. Make it first.")
        fault = _fault_of_writing(path)
        if fault is not None:
            raise ConfigError(f"[{flag}] Cannot write {path}: {fault}. Expected a file to write. Give another path.")


def _fault_of_writing(path: Path) -> str | None:
    """Why a file could not be written, seen before the work and not after it; nothing of it is changed."""
    was_there = os.path.exists(path)
    if was_there and not os.path.isfile(path):  # a pipe, which whoever reads it would see opened
        return None
    try:
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        return error.strerror
    return None


def _here(name: str, asked: argparse.Namespace) -> Verdict:
    if mx.default_device() == mx.cpu:
        mx.disable_compile()  # each fused kernel would be compiled by the system's C++ compiler
    target, plan = _find(name, asked), _plan(asked)
    num_layers = _count_layers(target)
    if num_layers is not None:
        _check_cuts(plan, num_layers)
    verdict = validate(target, plan)
    if num_layers is not None and not plan.layers:
        verdict.notes += _too_many(plan, num_layers)
        if verdict.word == "close" and (equal := _equal(verdict, plan, num_layers)):
            verdict.reason += f"; equal: {', '.join(equal)}"
    print(line(verdict), flush=True)
    return verdict


def _find(name: str, asked: argparse.Namespace) -> Target:
    """A target, with the quantized base that was asked for.

    Raises:
        ConfigError: If there is no such target, or its config says another base.
    """
    target = find_target(name, asked.num_layers, asked.full_size, asked.config)
    flags = _base_flags(asked)
    if not flags:
        return target
    if any(target.config.get(key) for key in ("quantization", "quantization_config")):
        raise ConfigError(
            f"[target] {' '.join(flags)} cannot be followed by {name}, whose config says how it is quantized. Expected "
            "one that does not. Leave it out, or change the config."
        )
    parameters = {**MODES[asked.q_mode or "affine"], **({"bits": asked.q_bits} if asked.q_bits else {})}
    return replace(target, convert=partial(as_converted, parameters=parameters, recipe=asked.quant_predicate))


def _base_flags(asked: argparse.Namespace) -> list[str]:
    """What was asked of the quantized base, as it is given."""
    given = {"--q-bits": asked.q_bits, "--q-mode": asked.q_mode, "--quant-predicate": asked.quant_predicate}
    flags = [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
    if flags and "qlora" not in asked.variants:
        raise ConfigError(
            f"[variants] {' '.join(flags)} is for qlora, which is not among {','.join(asked.variants)}. Expected it "
            "there. Add it, or leave the other out."
        )
    return flags


def _plan(asked: argparse.Namespace) -> Plan:
    plan = Plan(layers=asked.layers, variants=asked.variants)
    plan = replace(plan, stages=tuple(dict.fromkeys(asked.stages))) if asked.stages else plan
    return replace(plan, max_whole=0) if asked.quick else plan


def _count_layers(target: Target) -> int | None:
    """Layers that a cut may divide; None where the model fails, of which `validate` says how."""
    with kept_random_state():
        try:
            return count_layers(target.build())
        except Exception:  # a model's own code may raise anything
            return None


def _check_cuts(plan: Plan, num_layers: int) -> None:
    """Refuse a plan of which no cut is one of the model.

    Raises:
        PartitionError: If `--layers` are not all layers, or if there are fewer layers than stages.
    """
    if plan.layers:
        explicit(num_layers, plan.layers)
    else:
        even(num_layers, min(plan.stages))


def _too_many(plan: Plan, num_layers: int) -> list[str]:
    more = [num_stages for num_stages in plan.stages if num_stages > num_layers]
    return [f"{num_stages} stages were not tried: there are {num_layers} layers" for num_stages in more]


def _equal(verdict: Verdict, plan: Plan, num_layers: int) -> list[str]:
    """The cuts that are equal to one device in every way; none where not every cut was tried."""
    every = [
        "+".join(str(b - a) for a, b in itertools.pairwise([0, *ends, num_layers]))
        for num_stages in plan.stages
        for ends in itertools.combinations(range(1, num_layers), num_stages - 1)
    ]
    return [cut for cut in every if cut not in verdict.unequal] if len(every) == verdict.num_cuts else []


def _each_in_a_process(names: Sequence[str], asked: argparse.Namespace, found: dict[int, Verdict]) -> None:
    """Find the verdict of each name, by its number; no process is left, however this ends."""
    flags, running = _flags(asked), set[subprocess.Popen[str]]()

    def judge(at: int) -> None:
        found[at] = _in_a_process(names[at], [*flags, *_config_of(names[at], asked)], running)

    pool = ThreadPoolExecutor(asked.jobs)
    with _terminating_interrupts():
        try:
            for done in [pool.submit(judge, at) for at in range(len(names))]:
                done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
            pool.shutdown()


@contextmanager
def _terminating_interrupts() -> Generator[None]:
    """SIGTERM, which would leave the processes running, is taken as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _flags(asked: argparse.Namespace) -> list[str]:
    """What is asked of every target."""
    flags = ["--stages", ",".join(map(str, asked.stages))] if asked.stages else []
    flags += ["--num-layers", str(asked.num_layers)] if asked.num_layers else []
    flags += ["--layers", ",".join(map(str, asked.layers))] if asked.layers else []
    flags += ["--full-size"] if asked.full_size else []
    flags += ["--quick"] if asked.quick else []
    return [*flags, "--variants", ",".join(asked.variants), *_base_flags(asked)]


def _config_of(name: str, asked: argparse.Namespace) -> list[str]:
    return ["--config", str(asked.config)] if asked.config and is_class(name) else []


def _in_a_process(name: str, flags: Sequence[str], running: set[subprocess.Popen[str]]) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verdict.json"
        command = [sys.executable, "-m", "pptrain", "validate", name, *flags, "--json", str(path)]
        code, said = _ended(command, running)
        if path.exists():
            verdict = from_json(path.read_text(encoding="utf-8"))[0]
        elif code in _INTERRUPTED:
            raise KeyboardInterrupt  # which says nothing of the model
        else:
            # Not `fails on one device`, which is good: it may have been a cut that ended the process.
            verdict = Verdict(name, "cannot be cut here", _end_of(code, said))
    print(line(verdict), flush=True)
    return verdict


_INTERRUPTED = (130, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a process that somebody ended, not the model."""


def _ended(command: Sequence[str], running: set[subprocess.Popen[str]]) -> tuple[int, str]:
    """A process's exit code and what it said on stderr; it is among the running while it runs."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        running.add(process)
        said = process.communicate()[1]
    running.discard(process)
    return process.returncode, said


def _end_of(code: int, said: str) -> str:
    """Why a process ended without a verdict."""
    last = (said.strip().splitlines() or ["nothing on stderr"])[-1][:300]
    if code == UserError.exit_code:
        return last
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the process ended with {how}: {last}"
