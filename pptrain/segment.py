"""A part of the model's own forward as a function with gradients, cut at the layer boundaries.

Cutting is done by interception. A segment runs the whole model's `__call__`; layers before it hand on what was received
in place of what they made, and the forward ends where the first layer behind it would be called (or as soon as all that
crosses there is known). What lies outside is built but never evaluated: it costs nothing, and its weights are never
read. Layer numbers, masks and patterns stay the whole model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pptrain.compiling import EVALUATED
from pptrain.errors import ModelError
from pptrain.microbatch import Microbatch, TokenLoss, loss_share, mask_seed
from pptrain.model import Boundary, Slot, Specs, find_slots, intercepted, replaced, trainable_names
from pptrain.replay import Reached, Replay
from pptrain.trace import trace
from pptrain.unseen import refuse_unseen
from pptrain.values import Trace

_MAX_SHAPES = 8
"""Compiled functions and boundaries are kept for so many shapes, so that ragged data do not fill the memory."""


def _cannot_be_compiled(model: nn.Module) -> str:
    return (
        f"[model] {type(model).__module__} cannot be compiled: its forward evaluates arrays, which are none until a "
        "step is run. Expected a forward that only builds a graph. Set MLX_DISABLE_COMPILE=1, which mlx_lm.lora needs "
        "for it as well."
    )


def _calls_others(model: nn.Module, found: int, shape: tuple[int, ...], expected: int) -> str:
    return (
        f"[model] {type(model).__module__} cannot be cut: with tokens of shape {shape} its forward calls layers "
        f"{found} times, and with others {expected} times. Expected as many calls with tokens of any shape. Train this "
        "model on one device with mlx_lm.lora."
    )


def _reads_more(model: nn.Module, site: int, name: str, shape: tuple[int, ...]) -> str:
    where = f"layer {site - 1}, or what follows it," if site else "what comes before the layers"
    return (
        f"[model] {type(model).__module__} cannot be cut: with tokens of shape {shape} {where} reads {name}, which it "
        "does not hold and does not read with others. Expected a forward in which tokens of any shape read the same "
        "parameters, but for those that a layer holds itself. Freeze it, or let the layer hold it."
    )


def _make_room(cache: dict[Any, Any]) -> None:
    while len(cache) >= _MAX_SHAPES:
        cache.pop(next(iter(cache)))


@dataclass(frozen=True, slots=True)
class Work:
    """What a forward is about: one microbatch of one step."""

    microbatch: Microbatch
    index: int
    """Its place in the step: gradients are added in this order."""
    num_tokens: mx.array
    """float32 scalar: unmasked tokens of all microbatches of the step."""
    seed: int
    step: int


@dataclass(slots=True)
class Graph:
    """The backward of one vjp graph: its parts are evaluated when the schedule asks for them."""

    input_cotangents: Boundary
    """Empty where the segment's input is the tokens."""
    grads: list[mx.array]


@dataclass(frozen=True, slots=True)
class Look:
    """What the model does with tokens of one shape."""

    trace: Trace
    gradients: frozenset[int]
    """The values that have a gradient."""

    def crossing(self, site: int) -> Specs:
        """What crosses the cut before a site, going forward."""
        return self.trace.specs(site)

    def returning(self, site: int) -> Specs:
        """What crosses the cut before a site going backward: cotangents of those values that have one."""
        pairs = zip(self.trace.specs(site), self.differentiable(site), strict=True)
        return tuple(spec for spec, has_gradient in pairs if has_gradient)

    def differentiable(self, site: int) -> list[bool]:
        """Which of the values that cross before a site have a gradient."""
        return [value in self.gradients for value in self.trace.crossing(site)]


@dataclass(frozen=True)
class Cut:
    """The model and what all of its stages share."""

    model: nn.Module
    trace: Trace
    trainable: tuple[str, ...]
    loss: TokenLoss
    compile: bool
    is_trained: bool

    _looks: dict[tuple[int, ...], Look] = field(default_factory=dict[Any, Any])

    @staticmethod
    def of(model: nn.Module, tokens: mx.array, loss: TokenLoss, compile: bool = False, is_trained: bool = True) -> Cut:
        """Look at the model as it is now; `tokens` `[microbatch_size, seq]` are of any shape that it takes.

        Where its forward draws random numbers, nothing is compiled: a compiled function would freeze the seeds.
        """
        state: Any = mx.random.state
        before = state[0]
        found = trace(model, tokens, is_trained)
        draws = state[0] is not before
        refuse_unseen(model, found, tokens)
        if draws and not all(unit.is_whole for unit in found.units):
            raise ModelError(
                f"[dropout] {type(model).__module__} calls the parts of its layers and not the layers, so that no "
                "random numbers can be drawn for each layer. Expected a model without dropout or noise. Use dropout 0."
            )
        return Cut(model, found, trainable_names(model), loss, compile and not draws, is_trained)

    def look(self, tokens: mx.array) -> Look:
        """What the model does with tokens of this shape; kept for each of the last shapes."""
        shape = tuple(tokens.shape)
        if shape not in self._looks:
            _make_room(self._looks)
            found = trace(self.model, mx.zeros(shape, mx.int32), self.is_trained)
            self._refuse_more(found, shape)
            self._looks[shape] = Look(found, found.with_gradient(self.trainable))
        return self._looks[shape]

    def _refuse_more(self, found: Trace, shape: tuple[int, ...]) -> None:
        """Who runs what, and holds what trains, was settled before: nothing else is run or gets a gradient."""
        if found.num_positions != self.trace.num_positions:
            raise ModelError(_calls_others(self.model, found.num_positions, shape, self.trace.num_positions))
        trained = set(self.trainable)
        for site, (reads, known) in enumerate(zip(found.reads, self.trace.uses, strict=True)):
            if more := sorted((reads & trained) - known):
                raise ModelError(_reads_more(self.model, site, more[0], shape))

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """Where each parameter lives."""
        return find_slots(self.model)

    @cached_property
    def first_trained_site(self) -> int:
        """No cotangent goes further back than this site; one past the last if nothing trains."""
        trained = set(self.trainable)
        sites = [site for site, names in enumerate(self.trace.uses) if names & trained]
        return min(sites, default=len(self.trace.uses))

    @property
    def num_sites(self) -> int:
        """One more than layers."""
        return len(self.trace.uses)

    def keeps_order(self, site: int) -> bool:
        """Whether a cut before a site adds up every gradient in the order of one device: see `Trace.out_of_order`."""
        return not (self._trained & set(self.trace.out_of_order(site)))

    @cached_property
    def _trained(self) -> frozenset[int | str]:
        return self.trace.with_gradient(self.trainable) | set(self.trainable)

    def used(self, sites: Iterable[int]) -> list[str]:
        """Names of all parameters that these sites read, in tree order."""
        names = frozenset[str]().union(*(self.trace.uses[site] for site in sites))
        return [name for name in self.slots if name in names]


class Segment:
    """Consecutive sites of the forward as one differentiable function (sites: see `Trace`).

    Args:
        cut: The model.
        sites: Which part of it.
        later: The sites of its stage behind this segment. Gradients of parameters that they read too go on from their
            sums, as on one device: a sum of sums would be another number.
    """

    def __init__(self, cut: Cut, sites: range, later: range = range(0)) -> None:
        self.sites = sites
        self._cut = cut
        used, trained = cut.used(sites), set(cut.trainable)
        self.names = [name for name in cut.trainable if name in set(used)]
        self._slots = [cut.slots[name] for name in self.names]
        again = set(cut.used(later))
        self.continued = [name for name in self.names if name in again]
        """Those of `names` whose sums this segment goes on with."""
        self._frozen = [cut.slots[name] for name in used if name not in trained]
        self._compiled = dict[Any, Callable[..., Any]]()

    @property
    def trains(self) -> bool:
        """Whether a cotangent that enters here reaches anything that trains."""
        return self._cut.first_trained_site < self.sites.stop

    @property
    def passes_cotangent(self) -> bool:
        """Whether anything before this segment trains."""
        return self._cut.first_trained_site < self.sites.start

    def forward(self, work: Work, boundary: Boundary) -> Boundary:
        """The boundary after the last site, or at the model's end the microbatch's share of the loss.

        Args:
            work: The microbatch.
            boundary: What crosses before the first site; empty where that is the tokens.
        """

        replay = Replay.of_segment(self._cut.look(work.microbatch.inputs).trace, self.sites, boundary)
        replay.seed_of = lambda site: mask_seed(work.seed, work.step, work.index, site)
        mx.random.seed(mask_seed(work.seed, work.step, work.index, 0))
        try:
            with intercepted(replay.modules, replay.around):
                logits = self._cut.model(work.microbatch.inputs)
        except Reached:
            return replay.outputs()
        finally:
            replay.forget()
        return [loss_share(logits, work.microbatch, work.num_tokens, self._cut.loss)]

    def differentiate(
        self, work: Work, boundary: Boundary, cotangents: Boundary, sums: Sequence[mx.array] = ()
    ) -> tuple[Boundary, Graph]:
        """Build forward and backward as one graph. The cotangents' data may come later.

        Args:
            work: The microbatch.
            boundary: What crosses before the first site; empty where that is the tokens.
            cotangents: Gradients by the outputs that have one.
            sums: Gradients so far of the parameters in `continued`.

        Returns:
            The output, and what is left of the graph once the output has been evaluated.
        """
        weights, frozen = self.parameters()
        cotangents = [*cotangents, *sums]
        self._cut.look(work.microbatch.inputs)  # not for the first time within a compiled function
        if not self._cut.compile:
            output, *backward = self._vjp(work, boundary, cotangents, weights)
            return output, Graph(*backward)
        m = work.microbatch
        function = self._compiled_for(tuple(m.tokens.shape))
        try:
            output, *backward = function(m.tokens, m.lengths, work.num_tokens, boundary, cotangents, weights, frozen)
        except ValueError as error:
            if EVALUATED not in str(error):
                raise
            raise ModelError(_cannot_be_compiled(self._cut.model)) from error
        return output, Graph(*backward)

    def parameters(self) -> tuple[list[mx.array], list[mx.array]]:
        """What this segment reads, as it is now: what trains, by `names`, and what is frozen."""
        return [slot.array for slot in self._slots], [slot.array for slot in self._frozen]

    def reading(self, weights: Sequence[mx.array], frozen: Sequence[mx.array]) -> AbstractContextManager[None]:
        """Read other parameters for a while, given in the order of `parameters`."""
        return replaced([*self._slots, *self._frozen], [*weights, *frozen])

    def _vjp(
        self, work: Work, boundary: Boundary, cotangents: Boundary, weights: list[mx.array]
    ) -> tuple[Boundary, Boundary, list[mx.array]]:
        look = self._cut.look(work.microbatch.inputs)
        inward = look.differentiable(self.sites.start) if boundary else []
        outward = [True] if self.sites.stop == self._cut.num_sites else look.differentiable(self.sites.stop)
        inputs = [array for array, has_gradient in zip(boundary, inward, strict=True) if has_gradient]
        continued = [len(inputs) + self.names.index(name) for name in self.continued]

        def function(*primals: mx.array) -> Boundary:
            mine = iter(primals)
            given = [next(mine) if has_gradient else a for a, has_gradient in zip(boundary, inward, strict=True)]
            with replaced(self._slots, list(mine)):
                made = self.forward(work, given)
            # What has no gradient is no output that MLX wants a cotangent for.
            made = [a if has_gradient else mx.stop_gradient(a) for a, has_gradient in zip(made, outward, strict=True)]
            # A parameter that is an output, too, has its sum so far as that output's cotangent.
            return made + [primals[place] for place in continued]

        if not inputs and not weights:
            return function(), [], []
        output, grads = mx.vjp(function, [*inputs, *weights], cotangents)
        return output[: len(outward)], grads[: len(inputs)], grads[len(inputs) :]

    def _compiled_for(self, shape: tuple[int, ...]) -> Callable[..., Any]:
        """One compiled function for each shape, the oldest dropped: MLX itself would keep one for each shape for ever.

        All that the function reads is an input, since whatever it closed over would be frozen into it.
        """
        if shape not in self._compiled:
            _make_room(self._compiled)
            self._compiled[shape] = mx.compile(self.pure)
        return self._compiled[shape]

    def pure(
        self,
        tokens: mx.array,
        lengths: mx.array,
        num_tokens: mx.array,
        boundary: Boundary,
        cotangents: Boundary,
        weights: list[mx.array],
        frozen: list[mx.array],
    ) -> tuple[Boundary, Boundary, list[mx.array]]:
        """Output, cotangents of the boundary, and gradients, as a function of nothing but its arguments."""
        # Nothing random is drawn here (see `Cut.of`), so seed, step and index do not matter.
        work = Work(Microbatch(tokens, lengths), 0, num_tokens, 0, 0)
        with replaced(self._frozen, frozen):
            return self._vjp(work, boundary, cotangents, weights)
