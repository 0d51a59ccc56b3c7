"""A stage: consecutive layers run together, and its gradients; one graph a microbatch, evaluated in parts.

A stage builds lazy graphs and evaluates none of them: it hands the arrays to the executor, which evaluates them in
parts.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx

from pptrain.errors import ScheduleError
from pptrain.model import Boundary, Specs
from pptrain.segment import Cut, Graph, Segment, Work

Recompute = Literal["none", "layer", "stage"]

Parts = Generator[list[mx.array], None, None]
"""Lists of arrays to evaluate, one after another."""


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
