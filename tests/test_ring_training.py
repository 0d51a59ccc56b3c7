"""Training over real processes on 127.0.0.1, against the loopback and one device."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from processes import ROOT, report, run_ranks
from ring_steps import train
from tiny import assert_bit_equal, same_bits

pytestmark = pytest.mark.ring

TRAIN = ["-m", "pptrain", "train"]
VALIDATION = ["--val-batches", "1"]


def flags(demo: Path, out: Path, *more: str) -> list[str]:
    run = ["--num-layers", "-1", "--iters", "4", "--steps-per-report", "2", "--steps-per-eval", "2"]
    where = ["--model", str(demo / "model"), "--data", str(demo / "data"), "--adapter-path", str(out)]
    rest = ["--max-seq-length", "64", "--learning-rate", "1e-3", "--save-every", "3", *VALIDATION]
    return [*TRAIN, *where, *run, *rest, *more]


@pytest.fixture
def dropout(tmp_path: Path) -> list[str]:
    path = tmp_path / "lora.yaml"
    path.write_text("lora_parameters: {rank: 4, scale: 2.0, dropout: 0.2}\nmax_grad_norm: 1.0\n")
    return ["--config", str(path)]


@pytest.mark.parametrize(
    ("world_size", "schedule"),
    [(2, "1f1b"), (3, "1f1b"), (2, "interleaved"), (3, "interleaved"), (2, "zb-v"), (3, "zb-v"), (3, "zb-h2")],
)
def test_ring_adapters_are_bit_equal_to_the_loopbacks(world_size, schedule, demo_directory, tmp_path, dropout):
    """The loopback runs 1F1B: neither transport nor schedule changes a bit."""
    ring, loop = tmp_path / "ring", tmp_path / "loop"
    more = ["--schedule", schedule, "--check-messages", "--lanes", "single" if world_size == 2 else "auto"]
    ended = run_ranks([flags(demo_directory, ring, *dropout, *more)] * world_size, timeout_seconds=180)
    assert [rank.returncode for rank in ended] == [0] * world_size, report(ended)
    alone = run_ranks(
        [flags(demo_directory, loop, *dropout, "--transport", "loopback", "--stages", str(world_size))],
        timeout_seconds=180,
        environment={"MLX_RANK": "", "MLX_HOSTFILE": ""},
    )
    assert alone[0].returncode == 0, report(alone)
    for name in ("adapters.safetensors", "0000003_adapters.safetensors"):
        assert_bit_equal(mx.load(str(ring / name)), mx.load(str(loop / name)))


def test_ring_reports_come_once_and_name_every_rank(demo_directory, tmp_path):
    more = ["--train", "--test", "--test-batches", "1", "--trace", str(tmp_path / "trace.json")]
    ended = run_ranks([flags(demo_directory, tmp_path / "out", *more)] * 2, timeout_seconds=180)
    assert [rank.returncode for rank in ended] == [0, 0], report(ended)
    assert ended[0].stdout.count("train loss") == 2
    assert ended[0].stdout.count("Test loss") == 1
    assert ended[1].stdout == ""
    reports = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [len(r["peak_memory_by_rank"]) for r in reports if "train_loss" in r] == [2, 2]
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    ends = {e["name"]: e["ts"] + e["dur"] for e in events}
    assert len(ends) == 2 * 4 * 2
    # On one clock a forward begins after the one that it needs; other processes may hold up who reads the clock.
    assert all(e["ts"] > ends[f"0F{e['args']['microbatch']}"] - 1e5 for e in events if e["name"].startswith("1F"))


@pytest.mark.parametrize("lanes", ["directional", "single"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_five_adam_steps_over_the_ring_are_bit_equal_to_the_loopbacks(lanes, dtype, tmp_path):
    script = [str(ROOT / "tests" / "ring_steps.py"), str(tmp_path), "untied", lanes, dtype]
    ended = run_ranks([script] * 3, timeout_seconds=120)
    assert [rank.returncode for rank in ended] == [0, 0, 0], report(ended)
    expected, seen = train("loopback", 3, False, getattr(mx, dtype))
    # The loss is computed on the last rank, the norm on all: every rank reports the same.
    assert [json.loads(rank.stdout) for rank in ended] == [[list(step) for step in seen]] * 3
    for rank in range(3):
        found = mx.load(str(tmp_path / f"rank{rank}.safetensors"))
        names = expected.own_names(rank)
        assert sorted(found) == sorted(names)
        assert [name for name in names if not same_bits(found[name], expected.slots[name].array)] == []


def test_copies_of_a_tied_embedding_stay_bit_equal_to_each_other(tmp_path):
    script = [str(ROOT / "tests" / "ring_steps.py"), str(tmp_path), "tied", "directional", "float32"]
    ended = run_ranks([script] * 3, timeout_seconds=120)
    assert [rank.returncode for rank in ended] == [0, 0, 0], report(ended)
    first, middle, last = (mx.load(str(tmp_path / f"rank{rank}.safetensors")) for rank in range(3))
    name = "model.embed_tokens.weight"
    assert name not in middle
    assert same_bits(first[name], last[name])
    alone, _ = train("loopback", 1, True, mx.float32)
    assert mx.abs(first[name] - alone.slots[name].array).max().item() < 1e-5


def test_a_rank_holds_its_own_weights_and_a_tenth_more(tmp_path, demo_directory):
    model = write_wide_model(tmp_path, demo_directory)
    ended = run_ranks([[str(ROOT / "tests" / "ring_memory.py"), str(model)]] * 2, timeout_seconds=120)
    assert [rank.returncode for rank in ended] == [0, 0], report(ended)
    seen = [json.loads(rank.stdout) for rank in ended]
    for rank in seen:
        assert rank["own"] < 0.6 * rank["whole"]
        assert rank["before"] < 0.01 * rank["whole"]
        assert rank["own"] <= rank["active"] <= 1.1 * rank["own"]
        assert rank["peak"] <= 1.1 * rank["own"] + rank["largest"]


def write_wide_model(tmp_path: Path, demo_directory: Path) -> Path:
    """A model of some megabytes, beside which nothing else counts."""
    from mlx_lm.utils import save_config, save_model
    from tiny import LLAMA, llama

    directory = tmp_path / "wide"
    wide = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 260}
    save_model(directory, llama(8, **wide))
    save_config({**LLAMA, **wide, "num_hidden_layers": 8}, directory / "config.json")
    for path in (demo_directory / "model").glob("*token*"):
        shutil.copy(path, directory)
    return directory


def test_ranks_with_other_settings_are_refused_on_every_rank_naming_each(demo_directory, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(demo_directory, other)
    (other / "data" / "train.jsonl").write_text((other / "data" / "valid.jsonl").read_text())
    config = json.loads((other / "model" / "config.json").read_text())
    (other / "model" / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    differing = ("--seed", "7", "--batch-size", "3", "--microbatches", "3", "--schedule", "gpipe", "--layers", "2,4")
    commands = [flags(demo_directory, tmp_path / "a"), flags(other, tmp_path / "b", *differing)]
    ended = run_ranks(commands, timeout_seconds=120)
    assert [rank.returncode for rank in ended] == [5, 5], report(ended)
    for rank in ended:
        assert "Traceback" not in rank.stderr
        for name in ("seed", "batch-size", "microbatches", "schedule", "layers", "model", "data"):
            assert f"  {name}: rank 0 has " in rank.stderr, name
        assert "seed: rank 0 has 0, rank 1 has 7" in rank.stderr
        assert "layers: rank 0 has 3,3, rank 1 has 2,4" in rank.stderr


def test_rows_left_out_on_one_rank_alone_are_refused_on_every_rank(demo_directory, tmp_path):
    """A rank whose bad row is a good one elsewhere would train on other batches."""
    other = tmp_path / "other"
    shutil.copytree(demo_directory, other)
    path = other / "data" / "train.jsonl"
    path.write_text("{" + path.read_text())
    skip = [[], ["--skip-bad-rows"]]
    for mine, theirs in ((1, 1), (0, 1)):
        commands = [flags(demo_directory, tmp_path / "a", *skip[mine]), flags(other, tmp_path / "b", *skip[theirs])]
        ended = run_ranks(commands, timeout_seconds=120)
        assert [rank.returncode for rank in ended] == [5, 5], report(ended)
        for rank in ended:
            assert "  data: rank 0 has " in rank.stderr
            assert ("skip-bad-rows: rank 0 has false, rank 1 has true" in rank.stderr) == (mine != theirs)
    assert f"Left out 1 rows that cannot be used:\n  {path}:1: no JSON" in ended[1].stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--layers", "3,2"), "3,2 covers 5 layers"),
        (("--stages", "7"), "Cannot divide 6 layers into 7 stages"),
        (("--stages", "3"), "3 stages were asked for, but the transport has 2 ranks"),
        (("--transport", "loopback"), "started several over ring"),
        (("--schedule", "1f1c"), "1f1b"),
        (("--microbatches", "9"), "Cannot cut a batch of 4 into 9 microbatches"),
    ],
)
def test_a_cut_that_cannot_be_made_is_refused_on_every_rank_before_any_weight_is_read(
    more, said, demo_directory, tmp_path
):
    # Weights that cannot be read show that nobody tried.
    broken = tmp_path / "broken"
    shutil.copytree(demo_directory, broken)
    weights = broken / "model" / "model.safetensors"
    header = weights.read_bytes()[: 8 + int.from_bytes(weights.read_bytes()[:8], "little")]
    size = weights.stat().st_size
    weights.write_bytes(header)
    with weights.open("r+b") as file:
        file.truncate(size)
    ended = run_ranks([flags(broken, tmp_path / "out", *more)] * 2, timeout_seconds=120)
    assert [rank.returncode for rank in ended] == [2, 2], report(ended)
    for rank in ended:
        assert said in rank.stderr
        assert "Traceback" not in rank.stderr
    assert not (tmp_path / "out").exists()
