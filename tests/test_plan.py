import gc
import json

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from tiny import batch, llama, put_lora_on

from pptrain import Pipeline, cli, partition
from pptrain.advice import Question, answer, same
from pptrain.errors import ConfigError, PartitionError
from pptrain.graph import Parts
from pptrain.microbatch import cross_entropy
from pptrain.plan import Machines, balanced_layers, best, option, options, seconds_at
from pptrain.profile import share, time_sites
from pptrain.registry import SCHEDULES, find_schedule
from pptrain.segment import Cut
from pptrain.sizes import Held, Site, Sizes, measure
from transports import LoopbackWorld


def sizes_of(num_layers=8, weights=10, residual=4, first_trained=0):
    """An embedding of 20 bytes, layers that are alike, boundaries of 1 byte, and a head as costly as a layer."""
    layer = Site(Held(weights, 1, 2), Parts(1, 1, 1, residual), 1)
    last = Site(Held(weights + 20, 1, 2), Parts(2, 2, 2, residual), 1)
    return Sizes((Site(Held(20), Parts(0, 0, 0, 0), 0), *[layer] * (num_layers - 1), last), (), first_trained)


def machines_for(sizes, *memory, speed=1.0, link=0.0):
    return Machines(memory, (seconds_at(sizes, speed),) * len(memory), link)


def question(memory, *, m=4, batch=4, seq=512, residual_of=lambda rows, seq: rows * seq, **changes):
    look = lambda rows, seq: sizes_of(residual=residual_of(rows, seq))  # noqa: E731
    machines = lambda sizes, count: machines_for(sizes, *same(memory, count))  # noqa: E731
    return Question(look, machines, len(memory), batch, m, seq, **changes)


def test_a_rank_needs_weights_gradients_moments_and_residuals_of_the_microbatches_that_it_holds():
    sizes = sizes_of(residual=4)
    one = option(sizes, machines_for(sizes, 1e9, 1e9), find_schedule("1f1b")(2, 8), "none")
    assert one.layers == (4, 4) or one.layers == (5, 3)
    first, last = one.ranks
    k = one.layers[0]
    assert (first.weights, first.gradients, first.optimizer) == (20 + 10 * k, k, 2 * k)
    assert (first.residuals, first.boundaries) == (2 * 4 * k, 2 * 1)
    assert (last.residuals, last.boundaries) == (4 * (8 - k), 1)
    assert first.total == 20 + 10 * k + 3 * k + 8 * k + 2 + 6


def test_gpipe_holds_all_microbatches_and_recompute_only_inputs():
    sizes = sizes_of(residual=100)
    machines = machines_for(sizes, 1e9, 1e9)
    kept = {
        mode: option(sizes, machines, find_schedule("gpipe")(2, 8), mode).ranks[1].residuals
        for mode in ("none", "layer", "stage")
    }
    assert kept["none"] == 8 * 100 * option(sizes, machines, find_schedule("gpipe")(2, 8), "none").layers[1]
    assert kept["none"] > kept["layer"] > kept["stage"] == 0


def test_recompute_runs_each_forward_again():
    sizes = sizes_of()
    machines = machines_for(sizes, 1e9, 1e9)
    plain, again = (option(sizes, machines, find_schedule("sequential")(2, 4), mode) for mode in ("none", "layer"))
    assert again.step_seconds == pytest.approx(plain.step_seconds * 4 / 3)


def test_layers_before_all_that_trains_have_no_forward_to_run_again():
    frozen = Site(Held(10), Parts(1, 0, 0, 0), 1)
    sizes = Sizes((Site(Held(20), Parts(0, 0, 0, 0), 0), frozen, frozen, *sizes_of().sites[2:4]), (), 3)
    machines = machines_for(sizes, 1e9, 1e9)
    plain, again = (option(sizes, machines, find_schedule("sequential")(2, 1), mode) for mode in ("none", "layer"))
    assert again.step_seconds - plain.step_seconds == 2


@pytest.mark.parametrize("m", [4, 8])
def test_bubbles_of_equal_stages_are_those_of_the_formulas(m):
    layer = Site(Held(1), Parts(1, 1, 1, 1), 1)
    sizes = Sizes((Site(Held(), Parts(0, 0, 0, 0), 0), *[layer] * 8), (), 0)
    found = {o.schedule: o.bubble for o in options(sizes, machines_for(sizes, *[1e9] * 4), m, recomputes=("none",))}
    assert found["sequential"] == pytest.approx(3 / 4, abs=0.25)
    assert found["gpipe"] == found["1f1b"] == pytest.approx(3 / (m + 3))
    assert found["interleaved"] == pytest.approx(3 / (2 * m + 3))
    assert found["zb-h1"] == pytest.approx(3 / (3 * m + 3))


def test_links_lengthen_a_step():
    sizes = sizes_of()
    near, far = (
        option(sizes, machines_for(sizes, 1e9, 1e9, link=link), find_schedule("1f1b")(2, 4), "none")
        for link in (0.0, 5.0)
    )
    assert far.step_seconds > near.step_seconds


def test_a_machine_with_less_memory_gets_fewer_layers():
    sizes = sizes_of()
    one = option(sizes, machines_for(sizes, 1e9, 90), find_schedule("1f1b")(2, 4), "none")
    assert one.fits
    assert one.layers[1] < one.layers[0]
    assert one.ranks[1].total <= 90


def test_schedules_with_more_stages_than_layers_are_left_out_and_those_of_several_a_rank_are_cut_evenly():
    sizes = sizes_of(3)
    assert {o.schedule for o in options(sizes, machines_for(sizes, 1e9, 1e9), 4)} == {
        "sequential", "gpipe", "1f1b", "zb-h1", "zb-h2"
    }  # fmt: skip
    sizes = sizes_of(10)
    found = {o.schedule: o for o in options(sizes, machines_for(sizes, 1e9, 1e9), 4)}
    assert set(found) == set(SCHEDULES)
    assert (found["zb-v"].layers, found["zb-v"].is_balanced) == (partition.even(10, 4), False)
    assert [rank.layers for rank in found["zb-v"].ranks] == [(2, 2), (3, 3)]


def test_a_balanced_cut_for_several_stages_a_rank_is_refused():
    sizes = sizes_of()
    with pytest.raises(PartitionError, match=r"auto cuts for schedules of one stage a rank, and zb-v has 2"):
        balanced_layers(sizes, machines_for(sizes, 1e9, 1e9), find_schedule("zb-v")(2, 4), "none")


def test_more_ranks_than_layers_are_refused():
    sizes = sizes_of(2)
    with pytest.raises(PartitionError, match="Cannot divide 2 layers into 3 stages"):
        options(sizes, machines_for(sizes, 1e9, 1e9, 1e9), 4)


def test_the_fastest_that_fits_is_recommended():
    found = answer(question([1e9, 1e9]))
    assert found.recommended is not None
    fitting = [one for one in found.options if one.fits]
    assert found.recommended.step_seconds <= 1.01 * min(one.step_seconds for one in fitting)
    assert found.recommended.recompute == "none"
    assert found.remedies == ()


def test_of_schedules_that_are_as_fast_the_one_that_leaves_the_most_room_is_recommended():
    found = answer(question([1e9, 1e9], schedules=("gpipe", "1f1b")))
    assert found.recommended is not None
    assert found.recommended.schedule == "1f1b"
    assert len({one.step_seconds for one in found.options}) == 1


def test_recompute_is_recommended_where_residuals_do_not_fit():
    found = answer(question([5000, 5000], m=2, batch=2, seq=1000))
    assert found.recommended is not None
    assert found.recommended.recompute != "none"
    assert {one.recompute for one in found.options} == {found.recommended.recompute}


def test_a_clear_no_lists_what_would_make_it_fit():
    asked = question([9000, 9000], m=2, batch=8, schedules=("1f1b",), recomputes=("none",))
    found = answer(asked)
    assert found.recommended is None
    assert best(found.options) is None
    text = "\n".join(found.remedies)
    assert "--recompute layer" in found.remedies
    assert "another --schedule" not in text
    assert "--max-seq-length 256" in found.remedies
    assert "7 ranks, the new ones with 0 GB to use each" in found.remedies
    assert "--microbatches 4, of 2 rows each" in found.remedies


def test_fewer_microbatches_help_where_all_are_held():
    asked = question([16000, 16000], m=8, batch=8, schedules=("gpipe",), recomputes=("none",))
    assert any(remedy.startswith("fewer microbatches: --batch-size") for remedy in answer(asked).remedies)


def test_weights_that_no_machine_holds_need_more_ranks_and_nothing_else():
    found = answer(question([60, 60], residual_of=lambda rows, seq: 0))
    assert found.recommended is None
    assert [remedy.split(",")[0].split()[1] for remedy in found.remedies] == ["ranks"]


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.parametrize(
    ("schedule", "recompute"), [("gpipe", "none"), ("1f1b", "none"), ("gpipe", "layer"), ("gpipe", "stage")]
)
def test_steps_take_no_more_memory_than_planned_and_not_a_fifth_less(schedule, recompute):
    model, optimizer, rows = llama(6, hidden_size=128, intermediate_size=256, vocab_size=512), optim.Adam(1e-3), 8
    put_lora_on(model)
    data = batch(rows, 64, vocab=512)
    sizes = measure(Cut.of(model, mx.zeros((1, 8), mx.int32), cross_entropy), rows // 4, 64, optimizer)
    planned = option(sizes, machines_for(sizes, 1e12), find_schedule(schedule)(1, 4), recompute).ranks[0]
    pipeline = Pipeline(model, 1, schedule=schedule, recompute=recompute)
    pipeline.step(optimizer, *data, 4)
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    # How far MLX runs ahead of its computing thread, and so what is held at once, differs from step to step.
    for _ in range(6):
        pipeline.step(optimizer, *data, 4)
    taken = mx.get_peak_memory() - before
    assert taken <= planned.residuals + planned.boundaries + planned.working <= 1.2 * taken


# -- a profile, by a clock that the test turns -------------------------------------------------------------------------


class Clock:
    """A second later each time that it is looked at."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def small():
    model = llama(3)
    put_lora_on(model)
    cut = Cut.of(model, mx.zeros((1, 8), mx.int32), cross_entropy)
    return cut, measure(cut, 2, 8, optim.Adam(1e-3))


def test_a_profile_times_each_kind_of_layer_once():
    cut, sizes = small()
    clock = Clock()
    seconds = time_sites(cut, sizes, 2, 8, clock)
    assert seconds == ((1, 0, 0), (1, 1, 1), (1, 1, 1), (1, 1, 1))
    kinds = len({(site.parts, site.held, site.into_bytes) for site in sizes.sites})
    assert clock.now == 3 * (2 + 4 * (kinds - 1))


def test_a_profile_leaves_the_model_as_it_was():
    cut, sizes = small()
    before = {name: slot.array for name, slot in cut.slots.items()}
    time_sites(cut, sizes, 2, 8)
    assert all(slot.array is before[name] for name, slot in cut.slots.items())


def test_ranks_tell_each_other_what_they_measured():
    world = LoopbackWorld(2)
    mine = {0: ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)), 1: ((7.0, 8.0, 9.0), (1.0, 1.0, 1.0))}
    found = world.run({rank: share(world.transport(rank), mine[rank], 100.0 + rank) for rank in (0, 1)})
    for seconds, memory, speeds in found.values():
        assert seconds == (mine[0], mine[1])
        assert memory == (100.0, 101.0)
        assert {(speed.source, speed.to) for speed in speeds} == {(0, 1), (1, 0)}


# -- the command -------------------------------------------------------------------------------------------------------


def run(capsys, *options):
    code = cli.main(["plan", *options])
    return code, capsys.readouterr()


@pytest.fixture
def options_of_demo(demo_directory):
    return [
        "--model",
        str(demo_directory / "model"),
        "--batch-size",
        "4",
        "--max-seq-length",
        "32",
        "--num-layers",
        "-1",
    ]


def test_the_command_that_is_recommended_is_one_that_train_takes(capsys, options_of_demo):
    from pptrain.config import parse

    code, printed = run(capsys, *options_of_demo, "--memory", "1GB,1GB", "--json")
    found = json.loads(printed.out)
    assert (code, found["fits"]) == (0, True)
    words = found["command"].split()
    config = parse(words[words.index("train") + 1 :])
    assert list(config.layers) == found["chosen"]["layers"]
    assert (config.schedule, config.recompute) == (found["chosen"]["schedule"], found["chosen"]["recompute"])
    assert config.num_ranks(1) == 2
    assert {one["schedule"] for one in found["options"]} == set(SCHEDULES)


def test_the_text_has_a_row_for_each_rank_and_each_schedule_and_a_sentence(capsys, options_of_demo):
    code, printed = run(capsys, *options_of_demo, "--memory", "1GB,1GB,1GB")
    rows = printed.out.splitlines()
    assert code == 0
    assert [row.split()[0] for row in rows[2:5]] == ["0", "1", "2"]
    assert {row.split()[0] for row in rows if "%" in row and " GB  " in row} == set(SCHEDULES)
    assert "It fits" in rows[-2]
    assert rows[-1].startswith("  pptrain launch --hostfile hosts.json --backend ring -- pptrain train --model")


def test_what_does_not_fit_is_a_clear_no_and_exit_code_2(capsys, options_of_demo):
    code, printed = run(capsys, *options_of_demo, "--memory", "0.1MB,0.1MB")
    assert code == 2
    assert "It does not fit: even with" in printed.out
    assert "Each of these would make it fit" in printed.out or "Nothing that was tried helps" in printed.out


def test_a_schedule_and_recompute_mode_that_were_given_are_kept(capsys, options_of_demo):
    chosen = ["--schedule", "gpipe", "--recompute=stage", "--microbatches", "2", "--memory", "1GB,1GB"]
    _, printed = run(capsys, *options_of_demo, *chosen, "--json")
    found = json.loads(printed.out)
    assert [(one["schedule"], one["recompute"], one["num_microbatches"]) for one in found["options"]] == [
        ("gpipe", "stage", 2)
    ]


def test_a_profile_of_this_machine_gives_every_schedule_a_time(capsys, options_of_demo):
    code, printed = run(capsys, *options_of_demo, "--ranks", "2", "--memory", "1GB", "--profile", "--json")
    found = json.loads(printed.out)
    assert code == 0
    assert all(one["step_seconds"] > 0 for one in found["options"])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--memory", "much"], "'much' is no number for each rank"),
        (["--tflops", "0"], "not above 0"),
        (["--ranks", "1", "--memory", "1GB,1GB"], "1 ranks, but values for 2 are listed"),
        (["--rank", "2"], "Unknown argument '--rank'"),
    ],
)
def test_a_wrong_option_is_one_line(capsys, options_of_demo, wrong, says):
    code, printed = run(capsys, *options_of_demo, *wrong)
    assert code == 2
    assert says in printed.err
    assert "Traceback" not in printed.err


def test_the_last_value_stands_for_ranks_that_are_not_listed():
    assert same([512, 128], 4) == (512, 128, 128, 128)
    assert ConfigError.exit_code == 2
