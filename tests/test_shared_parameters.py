"""Case 7 in general: a parameter that any stages share, over real processes, each with a copy of its own."""

import json
import math
from pathlib import Path

import mlx.core as mx
import pytest
from processes import ROOT, report, run_ranks
from shared_steps import KINDS, MICROBATCHES, STEPS
from tiny import batch, leaves, same_bits

from pptrain import reference
from pptrain.microbatch import count_tokens, cut
from pptrain.model import find_slots

pytestmark = pytest.mark.ring

RANKS = 3
SHARED = {
    "block": {"shared.linear.weight", "shared.linear.bias"},
    "block used twice": {"shared.linear.weight", "shared.linear.bias"},
    "adapters": {"shared.linear.lora_a", "shared.linear.lora_b"},
    "tables": {"table.weight", "up.weight"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_five_adam_steps_with_a_shared_parameter(kind, tmp_path):
    script = [str(ROOT / "tests" / "shared_steps.py"), str(tmp_path), kind]
    ended = run_ranks([script] * RANKS, timeout_seconds=120, environment={"MLX_DISABLE_COMPILE": "1"})
    assert [rank.returncode for rank in ended] == [0] * RANKS, report(ended)
    norms = [json.loads(rank.stdout) for rank in ended]
    assert norms == [norms[0]] * RANKS
    for step in range(STEPS):
        check_step(KINDS[kind](), SHARED[kind], read(tmp_path, step), step, norms[0][step])
    last, gathered = read(tmp_path, STEPS), mx.load(str(tmp_path / "gathered.safetensors"))
    check_copies(last, SHARED[kind])
    # One copy in what is saved, the same as everybody's, and all that trains.
    assert sorted(gathered) == sorted(leaves(KINDS[kind]().trainable_parameters()))
    for name, array in gathered.items():
        assert all(same_bits(array, rank[name]) for rank in last if name in rank), name
    assert any(not same_bits(gathered[name], read(tmp_path, 0)[0][name]) for name in SHARED[kind])


def read(folder: Path, step: int) -> list[dict[str, mx.array]]:
    return [mx.load(str(folder / f"rank{rank}-{step}.safetensors")) for rank in range(RANKS)]


def check_copies(ranks, shared):
    for name in shared:
        copies = [rank[name] for rank in ranks if name in rank]
        assert len(copies) == RANKS, name
        assert all(same_bits(copy, copies[0]) for copy in copies), name


def check_step(model, shared, ranks, step, norm):
    """Copies and their gradients are alike; the sums are one device's, to the bound; the norm counts each once."""
    check_copies(ranks, shared | {f"grad:{name}" for name in shared})
    slots = find_slots(model)
    for rank in ranks:
        for name, array in rank.items():
            if not name.startswith("grad:"):
                slots[name].put(array)
    microbatches = cut(*batch(rows=5, seed=step), MICROBATCHES)
    theirs = leaves(reference.of_microbatches(model, microbatches).grads)
    ours = {name.removeprefix("grad:"): grad for rank in ranks for name, grad in rank.items() if "grad:" in name}
    assert set(ours) == set(theirs)
    for name, grad in theirs.items():
        if name in shared:
            assert mx.abs(ours[name] - grad).max().item() <= 1e-6 * largest(model, microbatches, name), (step, name)
        else:
            assert same_bits(ours[name], grad), (step, name)
    once = math.sqrt(sum((grad.astype(mx.float32) ** 2).sum().item() for grad in ours.values()))
    assert norm == pytest.approx(once, rel=1e-6)


def largest(model, microbatches, name):
    """The sum over microbatches of the parameter's largest gradient."""
    total, found = count_tokens(microbatches), 0.0
    for microbatch in microbatches:
        grads = leaves(reference.of_microbatches(model, [microbatch]).grads)
        found += mx.abs(grads[name]).max().item() * microbatch.num_tokens / total
    return found
