"""Every random thing that the property tests draw.

What is drawn are small frozen values that print as the call that makes them again; models, arrays and worlds are built
from them. So a failing example can be read, typed in, and made smaller by hand.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from mlx.utils import tree_map_with_path
from mlx_lm.models import gemma3_text, llama, qwen3
from mlx_lm.tuner.utils import linear_to_lora_layers

from pptrain.auto import auto
from pptrain.interleaved import interleaved
from pptrain.microbatch import Microbatch
from pptrain.program import Program
from pptrain.registry import SCHEDULES, count_stages_per_rank
from pptrain.schedule import Action, Builder, Schedule, gpipe, loop, one_f_one_b, spread, vee
from pptrain.simulate import Costs
from transports import Lanes, LoopbackWorld

VOCABULARY = 32
HIDDEN = 32
"""One group of quantized weights."""


def examples(share: float) -> settings:
    """A share of the profile's examples, for a test that takes long."""
    return settings(max_examples=max(10, int(settings().max_examples * share)))


# -- models ------------------------------------------------------------------------------------------------------------

Architecture = Literal["llama", "qwen3", "gemma3_text"]
Adapter = Literal["full", "lora", "dora"]


@dataclass(frozen=True)
class ModelCase:
    """A small model with random weights, and what of it trains."""

    architecture: Architecture
    num_layers: int
    num_kv_heads: int
    is_tied: bool
    dtype: Literal["float32", "bfloat16"]
    sliding_pattern: int
    """Every so many layers one attends to everything, the others to a window of 3; 1 for no windows."""
    adapter: Adapter
    is_quantized: bool
    trained_layers: tuple[int, ...]
    trains_embedding: bool
    trains_head: bool
    """With the final norm, unless adapters train; the table, where it is tied."""
    has_unused: bool
    """Whether one layer has a trainable parameter that nothing reads."""
    dropout: float
    seed: int

    @property
    def is_shared(self) -> bool:
        """Whether something that trains is read by the first stage and by the last."""
        return self.is_tied and (self.trains_embedding or self.trains_head)

    @property
    def trains_everything(self) -> bool:
        """Whether every stage of every cut has something to train, or something before it does."""
        return self.trains_embedding or self.is_shared or self.trained_layers[:1] == (0,)

    def build(self) -> nn.Module:
        """The same model, to the bit, each time."""
        mx.random.seed(self.seed)
        model = self._base()
        model.set_dtype(getattr(mx, self.dtype))
        if self.is_quantized:
            nn.quantize(model, group_size=32, bits=4, class_predicate=self._quantizes)
        model.freeze()
        if self.adapter == "full":
            self._unfreeze(model)
        else:
            self._adapt(model)
        if self.has_unused:
            model.layers[-1].unused = nn.Linear(2, 3)
        model.train()
        mx.eval(model.parameters())
        return model

    def _base(self) -> nn.Module:
        sizes = {
            "model_type": self.architecture,
            "hidden_size": HIDDEN,
            "num_hidden_layers": self.num_layers,
            "intermediate_size": HIDDEN,
            "num_attention_heads": 4,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "vocab_size": VOCABULARY,
        }
        if self.architecture == "qwen3":
            more = {"max_position_embeddings": 64, "rope_theta": 1e4, "tie_word_embeddings": self.is_tied}
            return qwen3.Model(qwen3.ModelArgs(**sizes, **more))
        if self.architecture == "gemma3_text":
            args = gemma3_text.ModelArgs(**sizes, sliding_window=3, sliding_window_pattern=self.sliding_pattern)
            model = gemma3_text.Model(args)
            if self.is_tied:
                model.sanitize({})
            return model
        kinds = ["full_attention" if self._sees_all(i) else "sliding_attention" for i in range(self.num_layers)]
        more = {"tie_word_embeddings": self.is_tied, "layer_types": kinds, "sliding_window": 3}
        return llama.Model(llama.ModelArgs(**sizes, **more))

    def _quantizes(self, _: str, module: nn.Module) -> bool:
        # mlx-lm's DoRAEmbedding takes no quantized one.
        return hasattr(module, "to_quantized") and not (self.adapter == "dora" and isinstance(module, nn.Embedding))

    def _sees_all(self, layer: int) -> bool:
        return layer % self.sliding_pattern == self.sliding_pattern - 1

    def _unfreeze(self, model: nn.Module) -> None:
        for layer in self.trained_layers:
            model.layers[layer].unfreeze()
        if self.trains_embedding or (self.trains_head and self.is_tied):
            model.model.embed_tokens.unfreeze()
        if self.trains_head:
            model.model.norm.unfreeze()
            if not self.is_tied:
                model.lm_head.unfreeze()

    def _adapt(self, model: nn.Module) -> None:
        keys = {"self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"}
        if self.trains_embedding or (self.trains_head and self.is_tied):
            keys.add("model.embed_tokens")
        if self.trains_head and not self.is_tied:
            keys.add("lm_head")
        config = {"rank": 2, "scale": 2.0, "dropout": self.dropout, "keys": keys}
        linear_to_lora_layers(model, self.num_layers, config, use_dora=self.adapter == "dora")
        for i, layer in enumerate(model.layers):
            if i not in self.trained_layers:
                layer.freeze()
        # `lora_b` begins at zero, so half of all gradients would be zero too.
        model.update(tree_map_with_path(self._filled, model.trainable_parameters()))

    def _filled(self, path: str, array: mx.array) -> mx.array:
        return 0.3 * mx.random.normal(array.shape) if path.endswith("lora_b") else array


def plain_model(num_layers: int) -> nn.Module:
    """The smallest llama with that many layers."""
    return ModelCase(
        "llama", num_layers, 1, False, "float32", 1, "full", False, (0,), True, True, False, 0.0, 0
    ).build()


@st.composite
def models(
    draw: st.DrawFn,
    min_layers: int = 1,
    max_layers: int = 8,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    dropouts: Sequence[float] = (0.0, 0.1, 0.5),
    is_tied: bool | None = None,
    is_full: bool = False,
) -> ModelCase:
    """Models of one of three architectures, and any part of them to train: at least something does."""
    num_layers = draw(st.integers(min_layers, max_layers))
    architecture = draw(st.sampled_from(["llama", "llama", "qwen3", "gemma3_text"]))
    adapter = "full" if is_full else draw(st.sampled_from(["full", "lora", "lora", "dora"]))
    trained = draw(trained_parts(num_layers)) if not is_full else (tuple(range(num_layers)), True, True)
    return ModelCase(
        architecture=architecture,
        num_layers=num_layers,
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        is_tied=draw(st.booleans()) if is_tied is None else is_tied,
        dtype=draw(st.sampled_from(dtypes)),
        sliding_pattern=1 if architecture == "qwen3" else draw(st.integers(1, min(3, num_layers))),
        adapter=adapter,
        is_quantized=adapter != "full" and draw(st.booleans()),
        trained_layers=trained[0],
        trains_embedding=trained[1],
        trains_head=trained[2],
        has_unused=draw(st.booleans()),
        dropout=0.0 if adapter == "full" else draw(st.sampled_from(dropouts)),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def trained_parts(draw: st.DrawFn, num_layers: int) -> tuple[tuple[int, ...], bool, bool]:
    """Layers that train, whether the embedding does, whether the head does."""
    every = tuple(range(num_layers))
    layers = draw(
        st.one_of(
            st.just(every),
            st.integers(0, num_layers).map(lambda n: every[:n]),
            st.integers(0, num_layers).map(lambda n: every[n:]),
            st.sets(st.sampled_from(every)).map(lambda some: tuple(sorted(some))),
        )
    )
    ends = [(False, False), (True, False), (False, True), (True, True)]
    return layers, *draw(st.sampled_from(ends if layers else ends[1:]))


# -- partition ---------------------------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn, num_layers: int, min_ranks: int = 1, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Any legal cut: layers of each stage."""
    most = num_layers // stages_per_rank
    num_stages = draw(st.integers(min(min_ranks, most), most)) * stages_per_rank
    inner = st.integers(1, num_layers - 1) if num_layers > 1 else st.nothing()
    ends = draw(st.sets(inner, min_size=num_stages - 1, max_size=num_stages - 1))
    places = [0, *sorted(ends), num_layers]
    return tuple(b - a for a, b in pairwise(places))


# -- batches -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchCase:
    """Rows of random tokens, of one width, and which targets of each row count."""

    width: int
    lengths: tuple[tuple[int, int], ...]
    seed: int

    @property
    def tokens(self) -> mx.array:
        """int32 `[batch, seq + 1]`."""
        rows = np.random.default_rng(self.seed).integers(0, VOCABULARY, (len(self.lengths), self.width + 1))
        return mx.array(rows.astype(np.int32))

    @property
    def bounds(self) -> mx.array:
        """int32 `[batch, 2]`."""
        return mx.array(np.array(self.lengths, dtype=np.int32))

    @property
    def microbatch(self) -> Microbatch:
        """All rows as one microbatch."""
        return Microbatch(self.tokens, self.bounds)

    @property
    def num_tokens(self) -> int:
        """Targets that count, one by one."""
        return sum(first <= t <= last for first, last in self.lengths for t in range(1, self.width + 1))

    def next(self) -> BatchCase:
        """Other tokens, the same shape and lengths."""
        return replace(self, seed=self.seed + 1)


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 1, max_rows: int = 8) -> BatchCase:
    """Ragged batches with prompts masked: rows that are masked wholly, bounds beyond the row, but never no token."""
    width = draw(st.integers(1, 9))
    rows = draw(st.lists(bounds(width), min_size=min_rows, max_size=max_rows))
    case = BatchCase(width, tuple(rows), draw(st.integers(0, 2**16)))
    if case.num_tokens:
        return case
    row = draw(st.integers(0, len(rows) - 1))
    return replace(case, lengths=(*rows[:row], (1, width), *rows[row + 1 :]))


def bounds(width: int) -> st.SearchStrategy[tuple[int, int]]:
    """First and last target of a row that count; none where the first lies behind the last."""
    end = st.integers(0, width + 1)
    return st.one_of(st.just((1, width)), end.map(lambda first: (first, width)), st.tuples(end, end), st.just((1, 0)))


@st.composite
def cut_batches(draw: st.DrawFn, max_microbatches: int = 6) -> tuple[BatchCase, int]:
    """A batch and into how many microbatches its rows are cut, evenly or not."""
    num_microbatches = draw(st.integers(1, max_microbatches))
    return draw(batches(num_microbatches, num_microbatches + 4)), num_microbatches


def widths_apart() -> st.SearchStrategy[list[BatchCase]]:
    """Microbatches of different widths, of which some may be masked wholly but not all."""
    return st.lists(batches(max_rows=3), min_size=1, max_size=5)


# -- schedules ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomSchedule:
    """Any legal schedule: from all stages together, an action that can run is picked at random until none is left.

    Microbatches go forward and backward in any order, each backward whole or in its two parts. Every rank has as many
    stages, which lie anywhere.
    """

    seed: int
    stages_per_rank: int = 1

    def __call__(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """The schedule of that many."""
        placement = list(loop(num_ranks, self.stages_per_rank))
        if self.stages_per_rank > 1:
            random.Random(f"{self.seed},{num_ranks}").shuffle(placement)
        return spread("random", num_microbatches, tuple(placement), self.sequence(len(placement), num_microbatches))

    def sequence(self, num_stages: int, num_microbatches: int) -> list[Action]:
        """The actions of all stages, in the order in which they were picked."""
        pick = random.Random(f"{self.seed},{num_stages},{num_microbatches}")
        ready, ran = [Action(0, "F", j) for j in range(num_microbatches)], list[Action]()
        while ready:
            action = ready.pop(pick.randrange(len(ready)))
            ran.append(action)
            ready += self._freed(action, num_stages, pick)
        return ran

    def _freed(self, action: Action, num_stages: int, pick: random.Random) -> list[Action]:
        stage, j = action.stage, action.microbatch

        def backward(stage: int) -> Action:
            return Action(stage, pick.choice(["B", "I"]), j)

        if action.kind == "F":
            return [Action(stage + 1, "F", j)] if stage + 1 < num_stages else [backward(stage)]
        weights = [Action(stage, "W", j)] if action.kind == "I" else []
        below = [backward(stage - 1)] if action.kind in ("B", "I") and stage else []
        return weights + below


def one_f_one_i_w(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B, each backward in its two parts, one right after the other."""
    whole = one_f_one_b(num_ranks, num_microbatches)
    rows = tuple(tuple(part for action in row for part in _parts(action)) for row in whole.actions)
    return replace(whole, actions=rows)


def one_f_one_i(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B of input parts; all weight parts come at the end."""
    parts = one_f_one_i_w(num_ranks, num_microbatches)
    return replace(parts, actions=tuple(tuple(sorted(row, key=lambda a: a.kind == "W")) for row in parts.actions))


def gpipe_descending(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, the last microbatch first."""
    whole, m = gpipe(num_ranks, num_microbatches), num_microbatches
    return replace(whole, actions=tuple(row[:m] + row[m:][::-1] for row in whole.actions))


def interleaved_by_3(num_ranks: int, num_microbatches: int) -> Schedule:
    """Three stages a rank."""
    return interleaved(num_ranks, num_microbatches, 3)


def auto_straight(num_ranks: int, num_microbatches: int) -> Schedule:
    """What the search finds for costs like a transformer's."""
    return auto(loop(num_ranks), num_microbatches, Costs({"F": 18.5, "I": 18.1, "W": 9.3}, 0.6), 2 * num_ranks)


def auto_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """What the search finds over a V."""
    return auto(vee(num_ranks), num_microbatches, Costs({"F": 2.0, "I": 3.0, "W": 2.0}, 0.5), num_ranks + 3)


def _parts(action: Action) -> list[Action]:
    if action.kind != "B":
        return [action]
    return [Action(action.stage, "I", action.microbatch), Action(action.stage, "W", action.microbatch)]


SPLIT: tuple[Builder, ...] = (one_f_one_i_w, one_f_one_i)


def schedules() -> st.SearchStrategy[str]:
    """The names that `--schedule` takes."""
    return st.sampled_from(sorted(SCHEDULES))


def any_schedules() -> st.SearchStrategy[str | Builder]:
    """Schedules by name, those that split their backward or turn its order round, looped ones and random ones."""
    return st.one_of(
        schedules(),
        st.sampled_from([*SPLIT, gpipe_descending, interleaved_by_3, auto_straight, auto_v]),
        st.builds(RandomSchedule, st.integers(0, 2**16), st.integers(1, 3)),
    )


@st.composite
def placed_schedules(
    draw: st.DrawFn, max_ranks: int = 4, max_more: int = 4, max_microbatches: int = 6
) -> tuple[Schedule, set[int]]:
    """Random schedules of stages that lie anywhere, and which stages hand a cotangent down; every rank has a stage."""
    num_ranks = draw(st.integers(1, max_ranks))
    more = draw(st.lists(st.integers(0, num_ranks - 1), max_size=max_more))
    placement = tuple(draw(st.permutations([*range(num_ranks), *more])))
    m = draw(st.integers(1, max_microbatches))
    sequence = RandomSchedule(draw(st.integers(0, 2**16))).sequence(len(placement), m)
    first_trained_stage = draw(st.integers(0, len(placement)))
    return spread("random", m, placement, sequence), set(range(first_trained_stage + 1, len(placement)))


@dataclass(frozen=True)
class Edit:
    """One mistake on one rank; places count modulo what there is."""

    change: Literal["swap", "drop", "double", "move"]
    rank: int
    place: int
    other: int

    def apply(self, programs: Sequence[Program]) -> tuple[Program, ...]:
        """The programs with this mistake."""
        edited = [list(program) for program in programs]
        program = edited[self.rank % len(edited)]
        if program:
            self._edit(program, self.place % len(program), self.other % len(program))
        return tuple(edited)

    def _edit(self, program: Program, a: int, b: int) -> None:
        match self.change:
            case "swap":
                program[a], program[b] = program[b], program[a]
            case "drop":
                program.pop(a)
            case "double":
                program.insert(b, program[a])
            case "move":
                program.insert(b, program.pop(a))


def edits(changes: Sequence[str] = ("swap", "drop", "double", "move")) -> st.SearchStrategy[Edit]:
    """Any one mistake."""
    place = st.integers(0, 99)
    return st.builds(Edit, st.sampled_from(changes), rank=st.integers(0, 3), place=place, other=place)


def built(schedule: str | Builder, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule, by name or function."""
    return builder_of(schedule)(num_ranks, num_microbatches)


def builder_of(schedule: str | Builder) -> Builder:
    """The function, by name or itself."""
    return SCHEDULES[schedule] if isinstance(schedule, str) else schedule


def most_residuals(actions: Sequence[Action]) -> int:
    """The most microbatches between their forward and the end of their backward."""
    return max(accumulate({"F": 1, "B": -1, "I": 0, "W": -1}[action.kind] for action in actions))


def recompute_modes() -> st.SearchStrategy[str]:
    """What is run again in the backward."""
    return st.sampled_from(["none", "layer", "stage"])


# -- worlds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldCase:
    """How messages travel, and which of all interleavings of the ranks is the one."""

    capacity: int | None
    lanes: Lanes
    seed: int

    def build(self, world_size: int) -> LoopbackWorld:
        """A new world of that many ranks."""
        return LoopbackWorld(world_size, capacity=self.capacity, lanes=self.lanes, seed=self.seed)


def worlds() -> st.SearchStrategy[WorldCase]:
    """Worlds of any capacity and lanes."""
    return st.builds(
        WorldCase,
        capacity=st.sampled_from([None, 1, 0]),
        lanes=st.sampled_from(["single", "directional"]),
        seed=st.integers(0, 2**16),
    )


# -- optimizer ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerCase:
    """One of MLX's optimizers, and how far gradients may reach."""

    name: Literal["adam", "adamw", "sgd", "adafactor"]
    max_grad_norm: float | None

    def build(self, eps: float = 1e-8) -> optim.Optimizer:
        """A new optimizer, without state."""
        if self.name == "sgd":
            return optim.SGD(learning_rate=1e-2, momentum=0.9)
        if self.name == "adafactor":
            return optim.Adafactor(learning_rate=1e-2, relative_step=False, scale_parameter=False)
        kind = optim.Adam if self.name == "adam" else optim.AdamW
        return kind(learning_rate=1e-2, eps=eps)


def optimizers() -> st.SearchStrategy[OptimizerCase]:
    """Mostly Adam; mostly with a norm that clips."""
    return st.builds(
        OptimizerCase,
        name=st.sampled_from(["adam", "adam", "adamw", "sgd"]),
        max_grad_norm=st.sampled_from([0.1, 0.1, 10.0, None]),
    )


# -- whole steps -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, a batch, and how the pipeline runs them."""

    model: ModelCase
    layers: tuple[int, ...]
    batch: BatchCase
    num_microbatches: int
    schedule: str | Builder
    recompute: Literal["none", "layer", "stage"]
    world: WorldCase
    seed: int

    @property
    def num_ranks(self) -> int:
        """P of the formulas."""
        return len(self.layers) // count_stages_per_rank(builder_of(self.schedule))


@st.composite
def cases(
    draw: st.DrawFn,
    models: st.SearchStrategy[ModelCase] = models(),  # noqa: B008
    schedules: st.SearchStrategy[str | Builder] = any_schedules(),  # noqa: B008
    min_ranks: int = 1,
) -> Case:
    """Everything at once."""
    model = draw(models)
    schedule = draw(schedules.filter(lambda one: count_stages_per_rank(builder_of(one)) <= model.num_layers))
    batch, num_microbatches = draw(cut_batches())
    return Case(
        model=model,
        layers=draw(cuts(model.num_layers, min_ranks, count_stages_per_rank(builder_of(schedule)))),
        batch=batch,
        num_microbatches=num_microbatches,
        schedule=schedule,
        recompute=draw(recompute_modes()),
        world=draw(worlds()),
        seed=draw(st.integers(0, 2**16)),
    )


# -- checkpoints -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """What a disk, a person or a program does to a file of a directory."""

    kind: Literal["flip", "cut short", "append", "delete", "swap", "copy over"]
    file: str
    other: str
    place: float
    """In the file, from 0 to 1."""
    bit: int

    def apply(self, directory: Path) -> set[str]:
        """Do it; returns the files whose bytes are others now."""
        path, other = directory / self.file, directory / self.other
        before = {name: _bytes(directory / name) for name in (self.file, self.other)}
        mine, theirs = before[self.file], before[self.other]
        match self.kind:
            case "flip" if mine:
                at = min(int(self.place * len(mine)), len(mine) - 1)
                path.write_bytes(mine[:at] + bytes([mine[at] ^ (1 << self.bit)]) + mine[at + 1 :])
            case "cut short" if mine:
                path.write_bytes(mine[: int(self.place * len(mine))])
            case "append" if mine:
                path.write_bytes(mine + bytes([self.bit]))
            case "delete":
                path.unlink(missing_ok=True)
            case "swap" if mine and theirs:
                path.write_bytes(theirs)
                other.write_bytes(mine)
            case "copy over" if mine:
                other.write_bytes(mine)
            case _:
                pass
        return {name for name, then in before.items() if _bytes(directory / name) != then}


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def damages(files: Sequence[str]) -> st.SearchStrategy[list[Damage]]:
    """One damage, or several one after the other; also to more files than any checkpoint survives."""
    one = st.builds(
        Damage,
        kind=st.sampled_from(("flip", "cut short", "append", "delete", "swap", "copy over")),
        file=st.sampled_from(files),
        other=st.sampled_from(files),
        place=st.floats(0, 1, exclude_max=True),
        bit=st.integers(0, 7),
    )
    return st.lists(one, min_size=1, max_size=8)
