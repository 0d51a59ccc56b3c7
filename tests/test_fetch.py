"""Which weight files a rank needs, found from their headers alone, and fetched from a hub on 127.0.0.1."""

import json
import re
import shutil

import mlx.core as mx
import mlx.nn as nn
import pytest
from hub import COMMIT, serving
from huggingface_hub.utils import SafetensorsFileMetadata, TensorInfo
from mlx.utils import tree_flatten
from mlx_lm.models import mixtral
from mlx_lm.utils import save_config
from processes import ROOT, report, run_ranks
from safetensors import safe_open
from tiny import LLAMA, assert_bit_equal, leaves, llama

from pptrain import Pipeline
from pptrain.agreement import model_digest
from pptrain.config import TrainConfig
from pptrain.errors import ModelError
from pptrain.fetch import WEIGHTS, needed_files, together, write_hollow
from pptrain.lazy import origins
from pptrain.recipe import load_base
from transports import LoopbackWorld

WIDE = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 260}


def write_shards(directory, weights, groups, *, index=True):
    """Each group of tensors, by a beginning of their names, in a file of its own; the rest in the last."""
    left, files = dict(weights), {}
    for number, starts in enumerate([*groups, ("",)], 1):
        chosen = {name: left.pop(name) for name in list(left) if name.startswith(tuple(starts))}
        files[f"model-{number:05d}-of-{len(groups) + 1:05d}.safetensors"] = chosen
    for name, arrays in files.items():
        mx.save_safetensors(str(directory / name), arrays, metadata={"format": "mlx"})
    if index:
        weight_map = {tensor: name for name, arrays in files.items() for tensor in arrays}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def sharded(demo_directory, tmp_path):
    """A llama of 6 layers in four files: embedding and layers 0-1; layers 2-3; layers 4-5; norm and head."""
    directory = tmp_path / "sharded"
    shutil.copytree(demo_directory / "model", directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights = leaves(llama(6, **WIDE).parameters())
    groups = [("model.embed", "model.layers.0.", "model.layers.1."), ("model.layers.2.", "model.layers.3.")]
    write_shards(directory, weights, [*groups, ("model.layers.4.", "model.layers.5.")])
    save_config({**LLAMA, **WIDE, "num_hidden_layers": 6}, directory / "config.json")
    return directory


def hollowed(directory, target):
    """The same directory with a hole in each weight file."""
    shutil.copytree(directory, target)
    for path in target.glob(WEIGHTS):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + size])
        metadata = entries.pop("__metadata__", None)
        tensors = {
            name: TensorInfo(dtype=e["dtype"], shape=e["shape"], data_offsets=tuple(e["data_offsets"]))
            for name, e in entries.items()
        }
        path.unlink()
        write_hollow(path, SafetensorsFileMetadata(metadata or {}, tensors), len(data))
    return target


def needed(directory, layers, rank):
    def own_names(loaded):
        return Pipeline(loaded.model, layers=layers).own_names(rank)

    found = needed_files(directory, TrainConfig(model=str(directory)), own_names)
    return sorted(int(name[6:11]) for name in found)


# -- which files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((2, 2, 2), [[1], [2], [3, 4]]),
        ((3, 3), [[1, 2], [2, 3, 4]]),
        ((1, 4, 1), [[1], [1, 2, 3], [3, 4]]),
        ((6,), [[1, 2, 3, 4]]),
    ],
)
def test_a_rank_needs_the_files_of_its_own_layers_whether_they_are_hollow_or_not(layers, expected, sharded, tmp_path):
    hollow = hollowed(sharded, tmp_path / "hollow")
    for directory in (sharded, hollow):
        assert [needed(directory, layers, rank) for rank in range(len(layers))] == expected


def write_experts(demo_directory, directory, num_experts):
    """A mixtral of 4 layers, each expert by itself: a file for each layer's experts, one for the rest of all layers."""
    config = {**LLAMA, **WIDE, "model_type": "mixtral", "num_local_experts": num_experts, "num_experts_per_tok": 2}
    weights = {}
    for name, array in leaves(mixtral.Model(mixtral.ModelArgs.from_dict(config)).parameters()).items():
        found = re.fullmatch(r"(.*block_sparse_moe\.)switch_mlp\.(\w+)\.weight", name)
        if found is None:
            weights[name] = array
            continue
        short = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[found[2]]
        weights |= {f"{found[1]}experts.{e}.{short}.weight": array[e] for e in range(num_experts)}
    shutil.copytree(demo_directory / "model", directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_config(config, directory / "config.json")
    experts = [(f"model.layers.{layer}.block_sparse_moe.experts.",) for layer in range(4)]
    write_shards(directory, weights, [*experts, tuple(f"model.layers.{layer}." for layer in range(4))])
    return directory


def test_experts_that_are_stacked_when_they_are_loaded_are_found_in_their_files(demo_directory, tmp_path):
    """The files have each expert by itself, under names that the model does not have."""
    directory = write_experts(demo_directory, tmp_path / "experts", 3)
    hollow = hollowed(directory, tmp_path / "hollow")
    assert [needed(hollow, (1, 2, 1), rank) for rank in range(3)] == [[1, 5, 6], [2, 3, 5], [4, 5, 6]]


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.parametrize("kind", ["plain", "experts"])
def test_loading_takes_no_more_than_the_weights_and_one_array(kind, sharded, demo_directory, tmp_path):
    """Experts are read one by one and stacked: of no more than one stack at a time."""
    directory = sharded if kind == "plain" else write_experts(demo_directory, tmp_path / "experts", 8)
    pipeline = Pipeline(load_base(TrainConfig(model=str(directory))).model, 2)
    sizes = [pipeline.slots[name].array.nbytes for name in {*pipeline.own_names(0), *pipeline.own_names(1)}]
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pipeline.load()
    assert sum(sizes) <= mx.get_active_memory() - before <= 1.1 * sum(sizes)
    assert mx.get_peak_memory() - before <= 1.1 * sum(sizes) + max(sizes)
    assert max(sizes) < 0.1 * sum(sizes)


def test_a_quantized_model_is_found_in_its_files(sharded, tmp_path):
    model = llama(6, **WIDE)
    nn.quantize(model, group_size=32, bits=4)
    for path in sharded.glob("model*"):
        path.unlink()
    write_shards(sharded, leaves(model.parameters()), [("model.layers.3.",)], index=False)
    quantization = {"group_size": 32, "bits": 4}
    save_config({**LLAMA, **WIDE, "num_hidden_layers": 6, "quantization": quantization}, sharded / "config.json")
    hollow = hollowed(sharded, tmp_path / "hollow")
    assert [needed(hollow, (3, 1, 2), rank) for rank in range(3)] == [[2], [1], [2]]


def test_parameters_that_no_tensor_is_named_like_may_come_from_any_file(sharded):
    found = needed_files(sharded, TrainConfig(model=str(sharded)), lambda loaded: {"renamed.weight"})
    assert len(found) == 4


def test_a_hollow_directory_has_the_shapes_sizes_and_digest_of_the_real_one_and_no_data(sharded, tmp_path):
    hollow = hollowed(sharded, tmp_path / "hollow")
    assert model_digest(hollow) == model_digest(sharded)
    real, found = (load_base(TrainConfig(model=str(d))).model.parameters() for d in (sharded, hollow))
    specs = [[(n, a.shape, a.dtype) for n, a in tree_flatten(tree)] for tree in (real, found)]
    assert specs[0] == specs[1]
    for path in hollow.glob(WEIGHTS):
        assert path.stat().st_blocks * 512 < 16_384 < path.stat().st_size


def test_a_file_shorter_than_its_header_says_is_refused(tmp_path):
    tensors = {"w": TensorInfo(dtype="F32", shape=[100], data_offsets=(0, 400))}
    with pytest.raises(ModelError, match="has 410 bytes on the hub, fewer than its header says"):
        write_hollow(tmp_path / "model.safetensors", SafetensorsFileMetadata({}, tensors), 410)


def test_a_header_that_is_padded_has_room_in_the_hollow_file_too(tmp_path):
    tensors = {"w": TensorInfo(dtype="F32", shape=[2, 3], data_offsets=(0, 24))}
    write_hollow(tmp_path / "model.safetensors", SafetensorsFileMetadata({"format": "mlx"}, tensors), 500)
    assert (tmp_path / "model.safetensors").stat().st_size == 500
    found = mx.load(str(tmp_path / "model.safetensors"))
    assert_bit_equal(found, {"w": mx.zeros((2, 3))})
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:  # takes no padding but spaces
        assert file.get_slice("w").get_shape() == [2, 3]


def test_origins_are_those_of_each_array_alone():
    leaf = {f"leaf {n}": mx.zeros((2, 3)) + n for n in range(4)}
    ends = {
        "stacked": mx.stack([leaf["leaf 0"], leaf["leaf 1"]]),
        "turned": leaf["leaf 2"].T,
        "itself": leaf["leaf 3"],
        "handle": leaf["leaf 3"].astype(mx.float32),
        "both": leaf["leaf 0"].T @ leaf["leaf 3"],
        "neither": mx.zeros((3,)),
    }
    assert origins(ends, leaf) == {
        "stacked": {"leaf 0", "leaf 1"},
        "turned": {"leaf 2"},
        "itself": {"leaf 3"},
        "handle": {"leaf 3"},
        "both": {"leaf 0", "leaf 3"},
        "neither": set(),
    }


def test_a_failure_while_ranks_fetch_is_raised():
    def fail():
        raise ModelError("not there")

    with pytest.raises(ModelError, match="not there"):
        together(LoopbackWorld(2), fail)


# -- from a hub, over processes ----------------------------------------------------------------------------------------


def fetch_and_train(hub, tmp_path, demo, world_size, out, *more, **environment):
    arguments = [
        *("train", "--model", "test/model", "--data", str(demo / "data"), "--adapter-path", str(tmp_path / out)),
        *("--num-layers", "-1", "--iters", "2", "--batch-size", "2", "--val-batches", "0", "--max-seq-length", "64"),
        *("--learning-rate", "1e-3", *more),
    ]
    command = [str(ROOT / "tests" / "hub_rank.py"), str(tmp_path / "cache"), *arguments]
    if world_size == 1:
        where = {"HF_ENDPOINT": hub.address, "MLX_RANK": "", "MLX_HOSTFILE": ""}
        return run_ranks([command], timeout_seconds=240, environment=where)
    return run_ranks(
        [command] * world_size, timeout_seconds=240, environment={"HF_ENDPOINT": hub.address, **environment}
    )


def weights_in_cache(tmp_path, rank):
    snapshot = tmp_path / "cache" / f"rank{rank}" / "hub" / "models--test--model" / "snapshots" / COMMIT
    return sorted(int(path.name[6:11]) for path in snapshot.glob("model-*.safetensors"))


@pytest.mark.ring
@pytest.mark.parametrize("has_index", [True, False])
def test_each_rank_fetches_its_own_files_alone_and_trains_the_adapters_of_the_whole_model(
    has_index, sharded, demo_directory, tmp_path
):
    if not has_index:
        (sharded / "model.safetensors.index.json").unlink()
    with serving(sharded) as hub:
        ended = fetch_and_train(hub, tmp_path, demo_directory, 3, "out")
        assert [rank.returncode for rank in ended] == [0, 0, 0], report(ended)
        assert [weights_in_cache(tmp_path, rank) for rank in range(3)] == [[1], [2], [3, 4]]
        whole = [name for name, asked in hub.taken if asked == "whole" and name.startswith("model-")]
        assert sorted(whole) == [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
        taken = len(hub.taken)
        again = fetch_and_train(hub, tmp_path, demo_directory, 3, "again", "--layers", "1,3,2")
        assert [rank.returncode for rank in again] == [0, 0, 0], report(again)
        assert [weights_in_cache(tmp_path, rank) for rank in range(3)] == [[1], [1, 2], [3, 4]]
        later = [name for name, asked in hub.taken[taken:] if asked == "whole" and name.startswith("model-")]
        assert later == ["model-00001-of-00004.safetensors"]
        alone = fetch_and_train(hub, tmp_path / "alone", demo_directory, 1, "out")
        assert alone[0].returncode == 0, report(alone)
        assert weights_in_cache(tmp_path / "alone", 0) == [1, 2, 3, 4]
    expected = mx.load(str(tmp_path / "alone" / "out" / "adapters.safetensors"))
    for out in ("out", "again"):
        found = mx.load(str(tmp_path / out / "adapters.safetensors"))
        assert_bit_equal(dict(sorted(found.items())), dict(sorted(expected.items())))


@pytest.mark.ring
def test_a_run_starts_again_without_the_hub_but_with_another_cut_only_if_its_files_are_here(
    sharded, demo_directory, tmp_path
):
    with serving(sharded) as hub:
        ended = fetch_and_train(hub, tmp_path, demo_directory, 2, "first")
        assert [rank.returncode for rank in ended] == [0, 0], report(ended)
    for way, offline in (("unreachable", {}), ("offline", {"HF_HUB_OFFLINE": "1"})):
        ended = fetch_and_train(hub, tmp_path, demo_directory, 2, way, **offline)
        assert [rank.returncode for rank in ended] == [0, 0], report(ended)
        found, expected = (mx.load(str(tmp_path / out / "adapters.safetensors")) for out in (way, "first"))
        assert_bit_equal(dict(sorted(found.items())), dict(sorted(expected.items())))
    ended = fetch_and_train(hub, tmp_path, demo_directory, 2, "other", "--layers", "1,5", HF_HUB_OFFLINE="1")
    assert [rank.returncode for rank in ended] == [3, 2], report(ended)
    assert "[model] Cannot load test/model" in ended[1].stderr
    assert "Traceback" not in ended[1].stderr


@pytest.mark.ring
def test_a_full_fine_tune_fetches_all_on_the_rank_that_writes_the_model(sharded, demo_directory, tmp_path):
    with serving(sharded) as hub:
        ended = fetch_and_train(hub, tmp_path, demo_directory, 2, "out", "--fine-tune-type", "full")
    assert [rank.returncode for rank in ended] == [0, 0], report(ended)
    assert [weights_in_cache(tmp_path, rank) for rank in range(2)] == [[1, 2, 3, 4], [2, 3, 4]]


@pytest.mark.ring
def test_a_file_that_one_rank_cannot_fetch_ends_all_at_once_and_is_named(sharded, demo_directory, tmp_path):
    """Not when the others have theirs, which may take hours."""
    with serving(sharded) as hub:
        hub.broken, hub.slow = {"model-00002-of-00004.safetensors"}, {"model-00001-of-00004.safetensors"}
        ended = fetch_and_train(hub, tmp_path, demo_directory, 3, "out")
    assert [rank.returncode for rank in ended] == [3, 2, 3], report(ended)
    assert "[model] Cannot load test/model" in ended[1].stderr
    assert "model-00002-of-00004.safetensors" in ended[1].stderr
    assert "Traceback" not in ended[1].stderr
    for rank in (0, 2):
        assert "rank 1 failed first" in ended[rank].stderr
    assert max(rank.seconds for rank in ended) < 110
