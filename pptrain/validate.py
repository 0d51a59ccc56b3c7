"""Can a model be cut and trained? Every cut of a tiny one is compared with one device, bit by bit.

A verdict is `ok` (bit-equal; a parameter that stages share to its stated bound), `close` (how far off, and where),
`fails on one device` (mlx-lm itself cannot train it here) or `cannot be cut here` (which cuts, and why).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from pptrain import mlx_lm_step, reference
from pptrain.errors import ModelError, PptrainError
from pptrain.microbatch import Microbatch, count_tokens, cut, kept_random_state
from pptrain.model import find_layers, find_slots
from pptrain.pipeline import Pipeline
from pptrain.reference import Result, number
from pptrain.stage import Recompute
from pptrain.target import Target
from pptrain.trace import SAMPLE, count_layers
from transports.buffers import bytes_of

Word = Literal["ok", "close", "fails on one device", "cannot be cut here"]
Variant = Literal["full", "lora", "qlora"]

_BOUNDS = {mx.float32: 1e-6, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
"""Of a parameter that stages share, relative to the sum over microbatches of its largest gradient; by its dtype."""

_LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0}
_SCHEDULES = ("1f1b", "zb-h1")
_RECOMPUTE: tuple[Recompute, ...] = ("none", "layer")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train a cut model."""

    layers: tuple[int, ...]
    variant: Variant
    schedule: str
    recompute: Recompute

    @property
    def cut(self) -> str:
        """`1+3`: layers of each stage."""
        return "+".join(map(str, self.layers))

    def __str__(self) -> str:
        return f"{self.variant}, layers {self.cut}, {self.schedule}, recompute {self.recompute}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is tried."""

    stages: tuple[int, ...] = (2, 3)
    layers: tuple[int, ...] | None = None
    """One cut, instead of all."""
    variants: tuple[Variant, ...] = get_args(Variant)
    max_every: int = 8
    """Layers up to which every cut is tried."""
    max_cuts: int = 28
    """With more layers, cuts of one number of stages; more are drawn at random."""
    max_whole: int = 7
    """With more cuts than this, each is tried in one way of every variant, the ways taking turns."""


@dataclass(slots=True)
class Verdict:
    """What was found about one model."""

    name: str
    word: Word = "ok"
    reason: str = ""
    num_cuts: int = 0
    num_runs: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list[str])
    """Each way that was not equal, and what of the plan could not be tried."""
    unequal: list[str] = field(default_factory=list[str])
    """Cuts (`1+3`) that are not equal to one device in some way."""

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong with cutting it."""
        return self.word in ("ok", "fails on one device")

    def __str__(self) -> str:
        what = f"{self.num_cuts} cuts, {self.num_runs} runs, {self.seconds:.1f} s"
        return f"{self.name:24} {self.word:20} {what}{'  ' + self.reason if self.reason else ''}"


def validate(target: Target, plan: Plan) -> Verdict:
    """Compare every cut of a model with one device."""
    start, verdict = time.monotonic(), Verdict(target.name)
    with kept_random_state():
        try:
            _judge(target, plan, verdict)
        finally:
            verdict.seconds = time.monotonic() - start
    return verdict


def _judge(target: Target, plan: Plan, verdict: Verdict) -> None:
    for variant in plan.variants:
        try:
            compared = _on_one_device(target, variant, verdict)
        except ModelError as error:  # ours, about what cannot be intercepted on one device either
            _note(verdict, "cannot be cut here", _short(error))
            return
        except Exception as error:
            # A model's own code may raise anything.
            if variant == "full":
                verdict.word, verdict.reason = "fails on one device", _short(error)
                return
            verdict.notes.append(f"{variant} was not tried: {_short(error)}")
            continue
        _compare_all(*compared, variant, plan, verdict)
        if verdict.word == "cannot be cut here":
            return
    if not verdict.num_runs:
        verdict.word, verdict.reason = "fails on one device", verdict.notes[0]


def _on_one_device(target: Target, variant: Variant, verdict: Verdict) -> tuple[nn.Module, list[Microbatch], Result]:
    """A model, its microbatches, and what one device makes of them.

    Where mlx-lm's LoRA takes a weight away that the model reads by itself, LoRA goes where it does not.
    """
    keys = set[str]()
    try:
        microbatches = _trainable(target, variant, verdict)
    except AttributeError as error:
        if variant == "full":
            raise
        keys = _keys_that_run(target)
        microbatches = _trainable(target, variant, verdict, keys)
        verdict.notes.append(f"{variant} of {', '.join(sorted(keys))} only; with all: {_short(error)}")
    model = _prepared(target, variant, verdict, keys)
    return model, microbatches, _one_device(model, microbatches)


def _trainable(target: Target, variant: Variant, verdict: Verdict, keys: Iterable[str] = ()) -> list[Microbatch]:
    """Microbatches on which mlx-lm can train; seen by a model of its own, which cannot be used any more."""
    model = _prepared(target, variant, verdict, keys)
    microbatches = _batch(model)
    mlx_lm_step.build(model, microbatches[0])
    return microbatches


def _compare_all(
    model: nn.Module, microbatches: Sequence[Microbatch], one: Result, variant: Variant, plan: Plan, verdict: Verdict
) -> None:
    try:
        count = count_layers(model)
        cuts = list(_cuts(count, plan))
    except ModelError as error:
        verdict.word, verdict.reason = "cannot be cut here", _short(error)
        return
    verdict.num_cuts = len(cuts)
    largest = _largest(model, microbatches)
    whole = [] if plan.layers else [Way((count,), variant, _SCHEDULES[0], recompute) for recompute in _RECOMPUTE]
    for way in [*whole, *_ways(cuts, variant, plan)]:
        verdict.num_runs += 1
        try:
            difference = _differs(model, way, microbatches, one, largest)
        except PptrainError as error:
            if way in whole:  # nor into any number of stages
                _note(verdict, "cannot be cut here", _short(error))
                return
            _note_way(verdict, "cannot be cut here", way, _short(error))
            continue
        if difference:
            _note_way(verdict, "close", way, difference)


def _note_way(verdict: Verdict, word: Word, way: Way, what: str) -> None:
    _note(verdict, word, f"{way}: {what}")
    if way.cut not in verdict.unequal:
        verdict.unequal.append(way.cut)


def _note(verdict: Verdict, word: Word, what: str) -> None:
    """The worst word counts, with the first reason for it."""
    verdict.notes.append(what)
    if verdict.word == "ok" or (verdict.word == "close" and word == "cannot be cut here"):
        verdict.word, verdict.reason = word, what


def _differs(
    model: nn.Module, way: Way, microbatches: Sequence[Microbatch], one: Result, largest: Mapping[str, float]
) -> str:
    """What a pipeline gives that one device does not; empty if nothing."""
    pipeline = Pipeline(model, layers=way.layers, schedule=way.schedule, recompute=way.recompute)
    result = pipeline.of_microbatches(microbatches)
    bounds = {name: _BOUNDS[pipeline.slots[name].array.dtype] * largest[name] for name in pipeline.shared_names}
    found = _difference(result, bounds, one)
    if found and pipeline.reordered:
        layers = ", ".join(map(str, pipeline.reordered))
        found += f"; one device adds gradients in turn from before and behind the cut at layer {layers}"
    return found


def _difference(result: Result, bounds: Mapping[str, float], one: Result) -> str:
    """The first thing that differs, and by how much; empty if nothing does."""
    if not _same(result.loss, one.loss):
        return f"loss {result.loss.item()} instead of {one.loss.item()}"
    ours, theirs = _leaves(result.grads), _leaves(one.grads)
    if ours.keys() != theirs.keys():
        return f"gradients of other parameters: {sorted(ours.keys() ^ theirs.keys())[:3]}"
    wrong = [name for name in theirs if not _same(ours[name], theirs[name])]
    off = {name: number(mx.abs(ours[name] - theirs[name]).max()) for name in wrong}
    wrong = [name for name in wrong if not off[name] <= bounds.get(name, -1.0)]
    if not wrong:
        return ""
    sizes = {name: number(mx.abs(theirs[name]).max()) for name in wrong}
    worst = max(wrong, key=lambda name: off[name] / max(sizes[name], 1e-30))
    return (
        f"{len(wrong)} of {len(theirs)} gradients differ; the first is {wrong[0]}, the farthest {worst}, by "
        f"{off[worst]:.1e} where its largest element is {sizes[worst]:.1e}"
    )


def _leaves(tree: Any) -> dict[str, mx.array]:
    leaves: Any = tree_flatten(tree)
    return dict(leaves)


def _same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(bytes_of(a), bytes_of(b))


def _cuts(num_layers: int, plan: Plan) -> Iterator[tuple[int, ...]]:
    """Layers of each stage, for every legal cut, or for some drawn at random where there are too many."""
    if plan.layers:
        yield plan.layers
        return
    for num_stages in plan.stages:
        every = list(itertools.combinations(range(1, num_layers), num_stages - 1))
        is_small = num_layers <= plan.max_every or len(every) <= plan.max_cuts
        some = every if is_small else sorted(random.Random(0).sample(every, plan.max_cuts))
        for ends in some:
            yield tuple(b - a for a, b in itertools.pairwise([0, *ends, num_layers]))


def _ways(cuts: Sequence[tuple[int, ...]], variant: Variant, plan: Plan) -> Iterator[Way]:
    pairs = list(itertools.product(_SCHEDULES, _RECOMPUTE))
    for turn, layers in enumerate(cuts):
        turns = pairs if len(cuts) <= plan.max_whole else [pairs[turn % len(pairs)]]
        for schedule, recompute in turns:
            yield Way(layers, variant, schedule, recompute)


def _prepared(target: Target, variant: Variant, verdict: Verdict, keys: Iterable[str] = ()) -> nn.Module:
    model = target.build()
    _fill_zeros(model)
    if variant == "qlora":
        notes = [f"qlora has {note}" for note in target.quantize(model)]
        verdict.notes += [note for note in notes if note not in verdict.notes]
    if variant != "full":
        model.freeze()
        _put_lora(model, keys)
        _fill_zeros(model)
    reference.evaluate(model.parameters())
    return model


def _put_lora(model: nn.Module, keys: Iterable[str]) -> None:
    """Names within layers; none for mlx-lm's own choice, which is every linear module."""
    config = {**_LORA, "keys": set(keys)} if keys else _LORA
    linear_to_lora_layers(model, len(getattr(model, "layers", [])), config)


def _keys_that_run(target: Target) -> set[str]:
    """Names, within layers, of the linear modules that may have LoRA by themselves."""
    kinds = nn.Linear | SwitchLinear
    layers = find_layers(target.build())
    names = {name for layer in layers for name, module in layer.named_modules() if isinstance(module, kinds)}
    return {name for name in names if _runs_with_lora(target.build(), name)}


def _runs_with_lora(model: nn.Module, key: str) -> bool:
    _put_lora(model, [key])
    try:
        model(mx.zeros(SAMPLE, mx.int32))
    except AttributeError:
        return False
    return True


def _fill_zeros(model: nn.Module) -> None:
    """Random values for parameters that start at zero (`lora_b`, gates): at zero many gradients would be zero."""
    for slot in find_slots(model).values():
        array = slot.array
        if mx.issubdtype(array.dtype, mx.floating) and not mx.any(array).item():
            slot.put((0.1 * mx.random.normal(array.shape)).astype(array.dtype))


def _batch(model: nn.Module) -> list[Microbatch]:
    """Three ragged microbatches: of 2, 2 and 1 rows, with masks of different lengths; longer than a tiny window."""
    vocabulary = min(_vocabulary(model), 90)
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, vocabulary, (5, 11), dtype=np.int32)
    lengths = [[1 + row % 2, 10 - row] for row in range(5)]
    return cut(mx.array(tokens), mx.array(lengths, dtype=mx.int32), 3)


def _vocabulary(model: nn.Module) -> int:
    logits: Any = model(mx.zeros((1, 4), mx.int32))
    if not isinstance(logits, mx.array):
        raise TypeError(f"a forward returns {type(logits).__name__}, not logits")
    return logits.shape[-1]


def _one_device(model: nn.Module, microbatches: Sequence[Microbatch]) -> Result:
    result = reference.of_microbatches(model, microbatches)
    for name, array in {"loss": result.loss, **_leaves(result.grads)}.items():
        if not mx.isfinite(array).all().item():
            raise ArithmeticError(f"{name} is not finite")
    return result


def _largest(model: nn.Module, microbatches: Sequence[Microbatch]) -> dict[str, float]:
    """The sum over microbatches of each parameter's largest gradient."""
    total, sums = count_tokens(microbatches), dict[str, float]()
    for microbatch in microbatches:
        share = microbatch.num_tokens / total
        for name, grad in _leaves(reference.of_microbatches(model, [microbatch]).grads).items():
            sums[name] = sums.get(name, 0.0) + share * number(mx.abs(grad).max())
    return sums


def _short(error: BaseException) -> str:
    """An error in one line, with the line of a model's code that raised it, and what is noted of it."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, PptrainError):
        return text  # whole, as what to do stands at its end
    text = f"{text[:300]} ..." if len(text) > 300 else text
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = f" ({last.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{last.tb_lineno})" if last else ""
    notes = "; ".join(["", *getattr(error, "__notes__", [])])
    return f"{type(error).__name__}: {text}{where}{notes}"
