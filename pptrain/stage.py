"""A stage: the model's own forward, cut at the layer boundaries, and its gradients.

Cutting is done by interception. A stage runs the whole model's `__call__`; layers before the stage hand on what was
received in place of what they made, and the forward ends where the next stage's first layer would be called (or as
soon as all that crosses there is known). What lies outside is built but never evaluated: it costs nothing, and its
weights are never read. Layer numbers, masks and patterns stay the whole model's.

A stage builds lazy graphs and evaluates none of them: it hands the arrays to the executor, which evaluates them in
parts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from pptrain.errors import ModelError, ScheduleError
from pptrain.microbatch import Microbatch, TokenLoss, loss_share, mask_seed
from pptrain.model import Boundary, Slot, Specs, find_slots, has_dropout, intercepted, replaced, trainable_names
from pptrain.replay import Reached, Replay
from pptrain.trace import trace
from pptrain.values import Trace

Recompute = Literal["none", "layer", "stage"]

Parts = Generator[list[mx.array], None, None]
"""Lists of arrays to evaluate, one after another."""

_MAX_SHAPES = 8
"""Compiled functions and boundaries are kept for so many shapes, so that ragged data do not fill the memory."""


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

    _looks: dict[tuple[int, ...], Look] = field(default_factory=dict[Any, Any])

    @staticmethod
    def of(model: nn.Module, tokens: mx.array, loss: TokenLoss, compile: bool = False) -> Cut:
        """Look at the model as it is now; `tokens` `[microbatch_size, seq]` are of any shape that it takes."""
        found = trace(model, tokens)
        if has_dropout(model) and not all(unit.is_whole for unit in found.units):
            raise ModelError(
                f"[dropout] {type(model).__module__} calls the parts of its layers and not the layers, so that no "
                "masks can be drawn for each layer. Expected a model without dropout. Use dropout 0."
            )
        return Cut(model, found, trainable_names(model), loss, compile)

    def look(self, tokens: mx.array) -> Look:
        """What the model does with tokens of this shape; kept for each of the last shapes."""
        shape = tuple(tokens.shape)
        if shape not in self._looks:
            _make_room(self._looks)
            found = trace(self.model, mx.zeros(shape, mx.int32))
            self._looks[shape] = Look(found, found.with_gradient(self.trainable))
        return self._looks[shape]

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

        replay = Replay(self._cut.look(work.microbatch.inputs).trace, self.sites, boundary)
        replay.seed_of = lambda layer: mask_seed(work.seed, work.step, work.index, layer + 1)
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
        output, *backward = function(m.tokens, m.lengths, work.num_tokens, boundary, cotangents, weights, frozen)
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
        # No random mask is drawn here (see `Pipeline`), so seed, step and index do not matter.
        work = Work(Microbatch(tokens, lengths), 0, num_tokens, 0, 0)
        with replaced(self._frozen, frozen):
            return self._vjp(work, boundary, cotangents, weights)


@dataclass(slots=True)
class _Kept:
    """What a segment keeps of one microbatch between forward and backward."""

    segment: Segment
    work: Work
    boundary: Boundary
    graph: Graph | None = None

    def build(self, cotangents: Boundary) -> Boundary:
        output, self.graph = self.segment.differentiate(self.work, self.boundary, cotangents)
        return output

    def backward(self, cotangents: Boundary, sums: Mapping[str, mx.array]) -> Graph:
        """The graph kept since the forward, or one built now, whose forward runs again."""
        so_far = [sums[name] for name in self.segment.continued]
        return self.graph or self.segment.differentiate(self.work, self.boundary, cotangents, so_far)[1]


@dataclass(slots=True)
class _Sums:
    """Gradients added in float32, in ascending order of microbatches whatever the order in which they come."""

    next_index: int = 0
    sums: dict[str, mx.array] = field(default_factory=dict[str, mx.array])
    early: dict[int, dict[str, mx.array]] = field(default_factory=dict[int, dict[str, mx.array]])

    def add(self, index: int, grads: dict[str, mx.array]) -> list[mx.array]:
        """Returns the arrays to evaluate."""
        self.early[index] = grads
        while (ready := self.early.pop(self.next_index, None)) is not None:
            self.next_index += 1
            for name, grad in ready.items():
                grad = grad.astype(mx.float32)
                self.sums[name] = self.sums[name] + grad if name in self.sums else grad
        return [*self.sums.values(), *(g for waiting in self.early.values() for g in waiting.values())]


class Stage:
    """Consecutive layers run together, with the residuals and gradients of one step."""

    def __init__(self, cut: Cut, stage: int, layers: range, recompute: Recompute = "none") -> None:
        self.stage = stage
        self.layers = layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == cut.num_sites - 1
        self._recompute = recompute
        self.sites = range(0 if self.is_first else layers.start + 1, layers.stop + 1)
        self._segments = [
            Segment(cut, sites, range(sites.stop, self.sites.stop))
            for sites in _segment_sites(cut, self.sites, recompute)
        ]
        self.names = [name for name in cut.trainable if any(name in segment.names for segment in self._segments)]
        self._cut = cut
        self.begin_step()

    @property
    def trains(self) -> bool:
        """Whether this stage has a backward: something in it, or before it, trains."""
        return self._segments[-1].trains

    @property
    def passes_cotangent(self) -> bool:
        """Whether the stage before needs a cotangent from this one."""
        return self._segments[0].passes_cotangent

    def begin_step(self) -> None:
        """Forget the residuals and gradients of the step before."""
        self._kept = dict[int, list[_Kept]]()
        self._grads = dict[int, dict[str, mx.array]]()
        self._input_cotangents = dict[int, Boundary]()
        self._sums = _Sums()
        self.losses = dict[int, mx.array]()
        self.max_live_residuals = 0

    @property
    def grads(self) -> Mapping[str, mx.array]:
        """Gradients of all microbatches so far, float32, by whole-model name."""
        return self._sums.sums

    @property
    def num_live_residuals(self) -> int:
        """Microbatches that have had their forward and not their whole backward."""
        return len(self._kept)

    def specs_in(self, work: Work) -> Specs:
        """What this stage receives going forward."""
        return self._cut.look(work.microbatch.inputs).crossing(self.sites.start)

    def specs_out(self, work: Work) -> Specs:
        """What this stage sends going forward."""
        return self._cut.look(work.microbatch.inputs).crossing(self.sites.stop)

    def specs_back(self, work: Work) -> Specs:
        """What this stage receives going backward."""
        return self._cut.look(work.microbatch.inputs).returning(self.sites.stop)

    def forward(self, work: Work, boundary: Boundary, cotangents: Boundary, keep: bool = True) -> Boundary:
        """Build the forward of one microbatch, and with it the backward where nothing is recomputed.

        Args:
            work: The microbatch.
            boundary: What the stage before sent, as `specs_in` says; empty on the first stage.
            cotangents: Gradients of the loss by those of this stage's outputs that have one, as `specs_back` says;
                their data may come later. Empty on the last stage, and where nothing is to be differentiated.
            keep: False for evaluation: no residuals.

        Returns:
            The outputs for the next stage, or on the last stage the microbatch's share of the loss, unevaluated.

        Raises:
            ScheduleError: If this microbatch has had its forward.
        """
        if work.index in self._kept or work.index in self.losses:
            raise ScheduleError(f"[stage {self.stage}] {self.stage}F{work.index} came twice. Run each action once.")
        kept = list[_Kept]()
        for segment in self._segments:
            item = _Kept(segment, work, boundary)
            if keep and segment.trains:
                kept.append(item)
            at_once = keep and segment.trains and segment is self._segments[-1] and self._recompute == "none"
            boundary = item.build(self._seeded(cotangents)) if at_once else segment.forward(work, boundary)
        if kept:
            self._kept[work.index] = kept
            self.max_live_residuals = max(self.max_live_residuals, len(self._kept))
        if self.is_last:
            self.losses[work.index] = boundary[0]
        return boundary

    def backward(self, index: int, cotangents: Boundary) -> Parts:
        """Pull cotangents back through the stage and add to its gradients; the residuals are freed.

        Args:
            index: Which microbatch's forward this answers.
            cotangents: Gradients of the loss by this stage's outputs, their data there; empty on the last stage.

        Yields:
            Arrays to evaluate before going on.

        Raises:
            ScheduleError: If this microbatch has had no forward, or has had its backward.
        """
        yield from self._pull_back(index, cotangents, whole=True)
        yield from self.backward_weights(index)

    def backward_input(self, index: int, cotangents: Boundary) -> Parts:
        """The input part of a backward: the cotangents for the stage before, and on the first stage down to what leaves
        the embedding (or to the first layer that trains), so that the weight part is about weights alone.
        """
        yield from self._pull_back(index, cotangents, whole=False)

    def backward_weights(self, index: int) -> Parts:
        """The weight part: add this microbatch's gradients, after `backward_input`."""
        if index not in self._grads:
            raise ScheduleError(f"[stage {self.stage}] {self.stage}W{index} came before its input part. Run I first.")
        self._kept.pop(index, None)
        yield [*self._input_cotangents.get(index, []), *self._sums.add(index, self._grads.pop(index))]

    def take_input_cotangents(self, index: int) -> Boundary:
        """The cotangents for the stage before; handed out once."""
        return self._input_cotangents.pop(index)

    def _seeded(self, cotangents: Boundary) -> Boundary:
        return [mx.array(1.0)] if self.is_last else cotangents

    def _pull_back(self, index: int, cotangents: Boundary, whole: bool) -> Parts:
        if index in self._grads or (self.trains and index not in self._kept):
            raise ScheduleError(
                f"[stage {self.stage}] The backward of microbatch {index} has no forward to answer, or came twice. "
                "Run each action once, forwards first."
            )
        total: dict[str, mx.array] = self._grads.setdefault(index, {})
        flow, kept = self._seeded(cotangents), self._kept.get(index, [])
        while kept:
            item = kept.pop()
            graph = item.backward(flow, total)
            total |= zip(item.segment.names, graph.grads, strict=True)
            flow = graph.input_cotangents
            if not whole:
                yield flow
            elif kept:
                yield [*flow, *graph.grads]
            if not kept and item.segment.passes_cotangent:
                self._input_cotangents[index] = flow


def _segment_sites(cut: Cut, sites: range, recompute: Recompute) -> list[range]:
    """Where a stage is cut within itself.

    Before the first layer, since what comes before (the embedding) has no input to pull a cotangent back to; before the
    first thing that trains, since nothing needs a cotangent further down; and for `--recompute layer` before each
    layer. But never where gradients would be added in another order than on one device: then both sides stay together.
    """
    breaks = {1, *(sites if recompute == "layer" else ())}
    breaks = {site for site in breaks & set(sites) if cut.keeps_order(site)} | {cut.first_trained_site}
    starts = sorted({sites.start} | (breaks & set(sites)))
    return [range(a, b) for a, b in zip(starts, [*starts[1:], sites.stop], strict=True)]
