"""The pipeline as a user holds it: a model, cut into stages, with gradients, training steps and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar, get_args

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from numpy.typing import NDArray

from pptrain import partition
from pptrain.checkpoint import gather
from pptrain.dry_run import dry_run
from pptrain.errors import ConfigError, ModelError, NonFiniteError
from pptrain.executor import Executor, materialize_each
from pptrain.microbatch import Microbatch, TokenLoss, count_tokens, cross_entropy, cut, kept_random_state
from pptrain.model import Slot, find_slots, has_dropout, trainable_names
from pptrain.optimizer import (
    Grads,
    add_shared,
    add_stage,
    add_up,
    check_finite,
    clip,
    global_norm,
    square_sum,
    to_tree,
    update,
)
from pptrain.program import Program, lower
from pptrain.reference import Result, StepResult, number
from pptrain.registry import count_stages_per_rank, find_schedule
from pptrain.schedule import Builder, Placement, Schedule, forward_only, stages_of
from pptrain.segment import Cut, Work
from pptrain.simulate import Span
from pptrain.stage import Recompute, Stage
from pptrain.trace import SAMPLE, count_layers
from transports import LoopbackWorld, Task, Transport, World, open_world

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one run of the program leaves behind."""

    losses: NDArray[np.float32]
    """float32, each microbatch's share."""
    squares: NDArray[np.float32]
    """float32, each trainable leaf's part of the squared norm."""
    grads: Grads
    num_asking: int
    """How many ranks ask for the run to stop."""


@dataclass(frozen=True, slots=True)
class _Settled:
    """Who runs and holds what of a model as it is now."""

    key: object
    """Equal as long as it stays so."""
    cut: Cut
    stages: dict[int, Stage]
    """Local ones."""
    holders: dict[str, list[int]]
    """The ranks that read each parameter that trains, ascending; in tree order."""
    programs: dict[object, tuple[Program, ...]] = field(default_factory=dict[object, tuple[Program, ...]])


class Pipeline:
    """A model cut into stages, run over a transport; its numbers are `reference`'s, bit for bit.

    Args:
        model: An mlx-lm model, its weights lazy or not, LoRA put on already. Its current parameters are read at each
            call.
        num_stages: Over how many ranks; one, or with a transport the number of its ranks, where it is not given. Each
            has as many stages as the schedule gives it: one, or several that the model passes through in turn.
        layers: An explicit cut: layers of each stage, of all ranks' stages in forward order.
        schedule: A name of `pptrain.registry.SCHEDULES`, or a function like those.
        stages_per_rank: For schedules that take any number (`interleaved`).
        transport: `loopback`, `ring`, `jaccl`, or a `transports.World`.
        recompute: What is run again in the backward instead of being kept: nothing, each layer, or the whole stage.
        loss: Token losses of logits and targets.
        seed: Of the dropout masks.
        compile: Whether to compile each segment for each shape; None for where it pays: on a GPU.

    Raises:
        PartitionError: If the layers cannot be divided so.
        ConfigError: If the schedule or recompute mode is unknown, or the transport has another number of ranks.
        TransportSetupError: If there is no such transport here.
        ModelError: If the model has no layers.
    """

    def __init__(
        self,
        model: nn.Module,
        num_stages: int | None = None,
        *,
        layers: Sequence[int] | None = None,
        schedule: str | Builder = "1f1b",
        stages_per_rank: int | None = None,
        transport: str | World = "loopback",
        recompute: Recompute = "none",
        loss: TokenLoss = cross_entropy,
        seed: int = 0,
        compile: bool | None = None,
    ) -> None:
        self.model = model
        world = transport if isinstance(transport, World) else None
        self._schedule = find_schedule(schedule, stages_per_rank) if isinstance(schedule, str) else schedule
        each = count_stages_per_rank(self._schedule)
        default = len(layers) // each if layers is not None else world.world_size if world else 1
        self.num_ranks = default if num_stages is None else num_stages
        with kept_random_state():
            num_layers = count_layers(model)
        self.layers = (
            partition.even(num_layers, self.num_ranks * each)
            if layers is None
            else partition.explicit(num_layers, layers, self.num_ranks * each)
        )
        if recompute not in get_args(Recompute):
            expected = ", ".join(get_args(Recompute))
            raise ConfigError(
                f"[recompute] Unknown {recompute!r}. Expected one of {expected}. Leave it out to keep all."
            )
        self._recompute: Recompute = recompute
        self._loss, self._seed, self._compile = loss, seed, compile
        self.world = world or _open(transport, self.num_ranks)
        if self.world.world_size != self.num_ranks:
            raise ConfigError(
                f"[stages] {self.num_ranks} stages were asked for, but the transport has {self.world.world_size} "
                "ranks. Expected one rank for each stage. Start as many processes as stages, or change --stages."
            )
        self.placement: Placement = self._schedule(self.num_ranks, 1).placement
        self.num_steps = 0
        """Steps taken; part of what dropout masks depend on."""
        self.asks_to_stop = False
        """Whether this process asks for the run to stop: the next step's result says on every rank that one does."""
        self._settled = dict[bool, _Settled]()  # for training, or for evaluation
        self.spans = dict[int, list[Span]]()
        """What each local rank ran in its last step, and when by its own clock."""
        self.ran: tuple[Program, ...] = ()
        """The programs of all ranks in the last step."""

    # -- what a user calls ---------------------------------------------------------------------------------------------

    def value_and_grad(self, batch: mx.array, lengths: mx.array, num_microbatches: int, *, step: int = 0) -> Result:
        """Loss and gradients of a batch.

        Args:
            batch: int32 `[batch, seq + 1]`, as mlx-lm's `iterate_batches` makes it.
            lengths: int32 `[batch, 2]`, first and last target position that counts, from 1, both included.
            num_microbatches: Into how many parts the rows are cut; the larger ones come first.
            step: Number of the step, for dropout masks.

        Returns:
            `grads` is float32 with the whole model's names; over processes it holds this rank's own leaves.

        Raises:
            BatchError: If the batch cannot be cut so, or is fully masked.
            TransportError: What went wrong on the wire.
        """
        return self.of_microbatches(cut(batch, lengths, num_microbatches), step=step)

    def of_microbatches(self, microbatches: Sequence[Microbatch], *, step: int = 0) -> Result:
        """`value_and_grad` of microbatches that are cut already, of any widths."""
        done = self._differentiate(microbatches, step)
        losses = tuple(mx.array(loss) for loss in done.losses)
        return Result(mx.array(add_up(done.losses)), count_tokens(microbatches), to_tree(done.grads), losses)

    def step(
        self,
        optimizer: optim.Optimizer,
        batch: mx.array,
        lengths: mx.array,
        num_microbatches: int,
        *,
        max_grad_norm: float | None = None,
    ) -> StepResult:
        """A whole training step: gradients, global norm, clipping, update. See `value_and_grad` for the arguments.

        Raises:
            NonFiniteError: If a loss or gradient is not a number, on every rank alike; nothing was updated.
        """
        return self.step_microbatches(optimizer, cut(batch, lengths, num_microbatches), max_grad_norm=max_grad_norm)

    def step_microbatches(
        self, optimizer: optim.Optimizer, microbatches: Sequence[Microbatch], *, max_grad_norm: float | None = None
    ) -> StepResult:
        """`step` over microbatches that are cut already, of any widths: several batches before one update."""
        done = self._differentiate(microbatches, self.num_steps)
        norm = global_norm(done.squares)
        losses = tuple(done.losses.tolist())
        try:
            check_finite(losses, dict(zip(self._known.cut.trainable, done.squares.tolist(), strict=True)))
        except NonFiniteError as error:
            error.num_asking = done.num_asking
            raise
        grads = done.grads if max_grad_norm is None else clip(done.grads, norm, max_grad_norm)
        update(optimizer, self.model, self.slots, grads)
        self.num_steps += 1
        return StepResult(add_up(done.losses), losses, count_tokens(microbatches), number(norm), done.num_asking)

    def loss_sum(self, microbatches: Sequence[Microbatch]) -> float:
        """Evaluation: token losses of all microbatches, summed, in evaluation mode; the same value on every rank.

        Nothing is kept, and parameters, optimizer and random state stay as they are.
        """
        with _evaluation_mode(self.model):
            done = self._run(microbatches, self._forwards, keep=False, step=0, num_tokens=1)
        return add_up(done.losses)

    @property
    def slots(self) -> dict[str, Slot]:
        """Where the whole model's parameters live."""
        return self._known.cut.slots

    @property
    def shared_names(self) -> frozenset[str]:
        """Trained parameters that several stages read, of one rank or not: their sums are in another order."""
        reads = [set(self._known.cut.used(self._sites(stage))) for stage in range(len(self.placement))]
        return frozenset(name for name in self._known.cut.trainable if sum(name in names for names in reads) > 1)

    @property
    def reordered(self) -> list[int]:
        """Layers before which a cut makes gradients of what crosses it add up in another order than on one device."""
        starts = [layers.start for layers in self._ranges[1:]]
        return [layer for layer in starts if not self._known.cut.keeps_order(layer + 1)]

    def stage(self, stage: int, is_trained: bool = True) -> Stage:
        """A local stage as training runs it, or as evaluation does, after the first call that ran it."""
        return (self._known if is_trained else self._settled[False]).stages[stage]

    def own_names(self, rank: int) -> list[str]:
        """Every parameter, frozen or not, that a rank's stages read; known after the first call or `load`."""
        return self._known.cut.used(self._sites_of(rank))

    def dry_run(self) -> None:
        """Build every stage's graphs, evaluating nothing, as any rank can.

        Raises:
            ModelError: If MLX has no gradient for something that needs one, with its stage and layer.
        """
        dry_run(self._known.cut, self.layers)

    def load(self) -> None:
        """Read the local stages' own weights, and nothing else, from disk."""
        self._settle()
        materialize_each(self.slots[name].array for rank in self.world.local_ranks for name in self.own_names(rank))

    def run(self, task: Callable[[Transport], Task[T]]) -> list[T]:
        """Run a task on each local rank; what each returned, in the order of ranks."""
        ranks = self.world.local_ranks
        done = self.world.run({rank: task(self.world.transport(rank)) for rank in ranks})
        return [done[rank] for rank in ranks]

    def everybody(self, value: float) -> list[float]:
        """A number of each rank's process, known to all."""

        def task(transport: Transport) -> Task[list[float]]:
            mine = [value if rank == transport.rank else 0.0 for rank in range(self.num_ranks)]
            numbers = transport.all_sum(mx.array(mine), "a number of each rank")
            yield numbers
            return [float(number) for number in np.asarray(numbers.array)]

        return self.run(task)[0]

    def gather(self) -> dict[str, mx.array]:
        """All trained parameters on the first rank; elsewhere those of this rank and of the ranks above."""
        held = [self.trained_by(rank) for rank in range(self.num_ranks)]
        return self.run(lambda transport: gather(transport, self.slots, held))[0]

    def trained_by(self, rank: int) -> list[str]:
        """Trainable parameters that a rank keeps the truth of: those that it reads and no lower rank does."""
        return [name for name, ranks in self._known.holders.items() if ranks[0] == rank]

    def updated_by(self, rank: int) -> list[str]:
        """Trainable parameters that a rank updates: those that it reads, shared with other ranks or not."""
        return [name for name, ranks in self._known.holders.items() if rank in ranks]

    # -- how it is done ------------------------------------------------------------------------------------------------

    def _differentiate(self, microbatches: Sequence[Microbatch], step: int) -> _Pass:
        return self._run(microbatches, self._schedule, keep=True, step=step, num_tokens=count_tokens(microbatches))

    def _forwards(self, _: int, num_microbatches: int) -> Schedule:
        return forward_only(self.placement, num_microbatches)

    def _run(
        self, microbatches: Sequence[Microbatch], schedule: Builder, keep: bool, step: int, num_tokens: int
    ) -> _Pass:
        settled = self._settle(is_trained=keep)
        count = mx.array(num_tokens, mx.float32)
        works = [Work(m, j, count, self._seed, step) for j, m in enumerate(microbatches)]
        programs = self._lowered(settled, schedule, len(works))
        if keep:
            self.ran = programs
        with kept_random_state():
            done = self.run(lambda transport: self._task(transport, settled, programs[transport.rank], works, keep))
        grads: Grads = {}
        for one in reversed(done):
            grads.update(one.grads)
        # In tree order, so that the tree looks like the model's.
        order = [name for name in settled.cut.trainable if name in grads]
        return replace(done[0], grads={name: grads[name] for name in order})

    def _task(
        self, transport: Transport, settled: _Settled, program: Program, works: Sequence[Work], keep: bool
    ) -> Task[_Pass]:
        rank = transport.rank
        stages = {stage: settled.stages[stage] for stage in stages_of(self.placement, rank)}
        for stage in stages.values():
            stage.begin_step()
        executor = Executor(program, stages, self.placement, transport, keep)
        yield from executor.run(works)
        grads: Grads = {}
        for stage in stages.values():
            add_stage(grads, stage.grads)
        if keep:
            self.spans[rank] = executor.spans
            yield from self._complete(transport, settled, grads)
        shares = {j: loss for stage in stages.values() for j, loss in stage.losses.items()}
        return (yield from self._summary(transport, settled.holders if keep else {}, shares, grads, len(works)))

    def _complete(self, transport: Transport, settled: _Settled, grads: Grads) -> Task[None]:
        """Sum what ranks share, and give zeros to what nothing uses."""
        for name, ranks in settled.holders.items():
            template = settled.cut.slots[name].array
            if len(ranks) > 1:
                yield from add_shared(transport, grads, ranks, name, template)
            elif ranks[0] == transport.rank and name not in grads:
                grads[name] = mx.zeros(template.shape, mx.float32)

    def _summary(
        self,
        transport: Transport,
        holders: Mapping[str, Sequence[int]],
        shares: Mapping[int, mx.array],
        grads: Grads,
        num_microbatches: int,
    ) -> Task[_Pass]:
        """Losses and squared norms of all leaves, known to all: each is one rank's, and zeros elsewhere add nothing."""
        zero = mx.array(0.0)
        losses = [shares.get(j, zero) for j in range(num_microbatches)]
        held = {name: name in grads and ranks[0] == transport.rank for name, ranks in holders.items()}
        squares = [square_sum(grads[name]) if mine else zero for name, mine in held.items()]
        asks = mx.array(float(self.asks_to_stop))
        summed = transport.all_sum(mx.stack([*losses, *squares, asks]), "losses and norms")
        yield summed
        values = np.array(summed.array)
        return _Pass(values[:num_microbatches], values[num_microbatches:-1], grads, int(values[-1]))

    @property
    def _known(self) -> _Settled:
        """The model as it was when it was last trained."""
        return self._settled.get(True) or self._settle()

    def _settle(self, is_trained: bool = True) -> _Settled:
        """Look at the model; anew if what trains or draws, where it lives, a dtype or a mode has changed.

        An evaluation changes nothing of what is settled for training: in its mode a forward may go another way.
        """
        compile = self._compile if self._compile is not None else mx.default_device() == mx.gpu
        slots = find_slots(self.model).items()
        places = tuple((name, id(slot.container), slot.array.dtype) for name, slot in slots)
        modes = tuple(module.training for module in self.model.modules())
        key = (trainable_names(self.model), places, modes, compile, has_dropout(self.model))
        there = [self._settled[of] for of in (is_trained, True) if of in self._settled]
        found = next((settled for settled in there if settled.key == key), None)
        self._settled[is_trained] = found or self._settled_now(key, compile, is_trained)
        return self._settled[is_trained]

    def _settled_now(self, key: object, compile: bool, is_trained: bool) -> _Settled:
        with kept_random_state():  # A forward with dropout draws, even one that is never evaluated.
            cut = Cut.of(self.model, mx.zeros(SAMPLE, mx.int32), self._loss, compile, is_trained)
        self._refuse_strangers(cut)
        holders = {name: self._ranks_that_read(cut, name) for name in cut.trainable}
        local = [stage for stage, rank in enumerate(self.placement) if rank in self.world.local_ranks]
        stages = {stage: Stage(cut, stage, self._ranges[stage], self._recompute) for stage in local}
        return _Settled(key, cut, stages, holders)

    def _refuse_strangers(self, cut: Cut) -> None:
        """A layer's own weights live with the layer; who else reads them must be in the same stage."""
        stage_of = {site: stage for stage in range(len(self.placement)) for site in self._sites(stage)}
        for site, owner, name in cut.trace.strangers:
            if stage_of[site] not in {stage_of[c.position + 1] for c in cut.trace.calls if c.layer == owner}:
                first, last = sorted((owner, site - 1))
                raise ModelError(
                    f"[model] {type(self.model).__module__} cannot be cut so: layer {site - 1} reads {name}, which is "
                    f"layer {owner}'s, in another stage. Expected layers that read their own parameters. Cut it "
                    f"elsewhere: layers {first} to {last} in one stage."
                )

    @property
    def _ranges(self) -> tuple[range, ...]:
        return partition.ranges(self.layers)

    def _sites(self, stage: int) -> range:
        return partition.sites(self._ranges[stage])

    def _sites_of(self, rank: int) -> list[int]:
        return [site for stage in stages_of(self.placement, rank) for site in self._sites(stage)]

    def _ranks_that_read(self, cut: Cut, name: str) -> list[int]:
        """Ascending; a trainable parameter that none reads is the first rank's."""
        uses = cut.trace.uses
        ranks = [r for r in range(self.num_ranks) if any(name in uses[site] for site in self._sites_of(r))]
        return ranks or [0]

    def _lowered(self, settled: _Settled, builder: Builder, num_microbatches: int) -> tuple[Program, ...]:
        key = (builder, num_microbatches)
        if key not in settled.programs:
            schedule = builder(self.num_ranks, num_microbatches)
            stages = range(1, len(self.placement))
            passing = {s for s in stages if settled.cut.first_trained_site < self._sites(s).start}
            lanes = self.world.transport(self.world.local_ranks[0]).lanes
            settled.programs[key] = lower(schedule, lanes, passing)
        return settled.programs[key]


def _open(name: str | World, num_ranks: int) -> World:
    if name == "loopback":
        return LoopbackWorld(num_ranks)
    assert isinstance(name, str)
    return open_world(name)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Generator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
