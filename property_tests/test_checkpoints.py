"""Whatever is done to the files of checkpoints, a run goes on with the right numbers or is refused by a file's name."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from strategies import Damage, damages, examples

from pptrain import Pipeline
from pptrain.config import TrainConfig
from pptrain.errors import CheckpointError
from pptrain.job import open_checkpoints
from pptrain.progress import Progress, mlx_state, numpy_state
from pptrain.saving import Checkpoints

SETTINGS = {"seed": "0"}
ITERATIONS = (1, 2, 3)
WRITTEN_BY = 2

State = dict[str, bytes]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __call__(self, hidden: mx.array) -> mx.array:
        return hidden + self.linear(hidden)


class Model(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        mx.random.seed(seed)
        self.embed = nn.Embedding(8, 4)
        self.layers = [Layer() for _ in range(3)]

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.embed.as_linear(hidden)


@cache
def written() -> tuple[Path, dict[int, State]]:
    """Three checkpoints of two ranks, and what a run that stands at each of them has."""
    directory = Path(tempfile.mkdtemp())
    pipeline, optimizer = Pipeline(Model(0), WRITTEN_BY), optim.Adam(1e-2)
    checkpoints, states = Checkpoints(directory, len(ITERATIONS), SETTINGS), dict[int, State]()
    for iteration in ITERATIONS:
        tokens = mx.array([[1, 2, 3, iteration], [3, iteration, 5, 7]])
        pipeline.step(optimizer, tokens, mx.array([[1, 3], [1, 3]]), 2)
        progress = Progress(iteration, iteration, 0, iteration, numpy_state(), numpy_state(), mlx_state())
        checkpoints.save(pipeline, optimizer, progress)
        states[iteration] = state_of(pipeline, optimizer)
    return directory, states


def state_of(pipeline: Pipeline, optimizer: optim.Optimizer) -> State:
    trees = {"parameter": pipeline.model.parameters(), "moment": optimizer.state}
    return {f"{kind} {n}": bytes(memoryview(a)) for kind, tree in trees.items() for n, a in tree_flatten(tree)}


def go_on(directory: Path, num_stages: int) -> tuple[int, State]:
    """The iteration that another run goes on from, and what it has then."""
    pipeline, optimizer = Pipeline(Model(5), num_stages), optim.Adam(1e-2)
    config = TrainConfig(checkpoint_dir=str(directory), resume="auto")
    progress, _ = open_checkpoints(config, pipeline, optimizer, SETTINGS)
    assert progress is not None, "it was begun again, although there are checkpoints"
    return progress.iteration, state_of(pipeline, optimizer)


def tried(directory: Path, num_stages: int) -> tuple[int, State, str]:
    """As `go_on`, or what is said where it is refused."""
    try:
        return *go_on(directory, num_stages), ""
    except CheckpointError as error:
        return 0, {}, str(error)


def folder_of(iteration: int) -> str:
    return f"{iteration:07d}-of-{WRITTEN_BY}"


def files() -> list[str]:
    directory, _ = written()
    return sorted(str(path.relative_to(directory)) for path in directory.glob("*/*"))


@examples(0.6)
@given(done=damages(files()), num_stages=st.integers(1, 3))
def test_damaged_checkpoints_are_refused_by_name_or_gone_on_from_with_the_right_numbers(
    done: list[Damage], num_stages: int
):
    directory, states = written()
    with tempfile.TemporaryDirectory() as copy:
        there = Path(copy) / "checkpoints"
        shutil.copytree(directory, there)
        touched = {name for damage in done for name in damage.apply(there)}
        iteration, found, refusal = tried(there, num_stages)
    if refusal:
        event("refused")
        assert {name.split("/")[0] for name in touched} == {folder_of(i) for i in ITERATIONS}
        assert [i for i in ITERATIONS if folder_of(i) not in refusal] == []
        return
    event(f"gone on from iteration {iteration}")
    assert found == states[iteration]
    untouched = [i for i in ITERATIONS if not any(name.startswith(folder_of(i)) for name in touched)]
    assert iteration >= max(untouched, default=0)


@pytest.mark.parametrize("rank", range(WRITTEN_BY))
def test_a_manifest_with_another_byte_is_refused_or_means_the_same(rank: int):
    """Bytes all over it are changed in turn, the few that JSON does not care for included."""
    directory, states = written()
    with tempfile.TemporaryDirectory() as copy:
        there = Path(copy) / "checkpoints"
        shutil.copytree(directory, there)
        manifest = there / folder_of(3) / f"rank{rank}.json"
        whole = manifest.read_bytes()
        for place in range(rank, len(whole), 397):
            manifest.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            iteration, found = go_on(there, 2)
            assert iteration in (2, 3)
            assert found == states[iteration]
