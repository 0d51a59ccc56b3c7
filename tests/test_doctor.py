"""`pptrain doctor`: what it says of a machine alone, of real links, and of links that cannot be relied on."""

from __future__ import annotations

import json

import liars
import mlx.core as mx
import pytest
from liar_world import Honest, LiarWorld
from processes import report, run_ranks

from pptrain import doctor
from pptrain.cli import main
from pptrain.machine import Backend, Machine, jaccl, matrix_product_rate, ring
from transports import LoopbackWorld
from transports.contract import MIB, PROMISES, in_one_run
from transports.endings import ENDINGS
from transports.jaccl import frame_class
from transports.measure import LinkSpeed

DOCTOR = ["-m", "pptrain", "doctor"]


@pytest.fixture(autouse=True)
def _not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_METAL_FAST_SYNCH"):
        monkeypatch.delenv(variable, raising=False)


# Alone.


def test_alone_it_says_what_the_machine_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("machine", "chip", "memory", "python", "mlx", "mlx-lm", "loopback ", "jaccl", "verdict"):
        assert f"{word} " in said
    assert "looked at alone" in said
    assert "contract" not in said


def test_alone_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    [here] = said["ranks"]
    assert sorted(here["machine"]["versions"]) == ["mlx", "mlx-lm", "pptrain", "python"]
    assert here["machine"]["memory_bytes"] > 2**30
    assert [backend["name"] for backend in here["backends"]] == ["loopback", "ring", "jaccl"]
    assert (said["links"], said["warnings"]) == (None, [])


def test_an_unknown_option_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--jsno"]) == 2
    assert "--jsno" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("is_built", "macos", "devices", "why_not", "what_to_do"),
    [
        (False, None, [], "RDMA over Thunderbolt 5, which macOS has", "Use the ring"),
        (True, (26, 1), ["rdma_en2"], "macOS 26.1 is older than 26.2", "Update macOS"),
        (True, (15, 7, 1), ["rdma_en2"], "macOS 15.7.1 is older than 26.2", "Update macOS"),
        (False, (26, 2), ["rdma_en2"], "this MLX was built without it", "pip install -U mlx"),
        (True, (26, 3), [], "no RDMA device", "rdma_ctl enable"),
    ],
)
def test_why_there_is_no_jaccl(is_built, macos, devices, why_not, what_to_do) -> None:
    found = jaccl(is_built, macos, devices)
    assert not found.is_available
    assert why_not in found.why_not
    assert what_to_do in found.what_to_do


def test_where_there_are_jaccl_and_ring() -> None:
    assert jaccl(True, (26, 2), ["rdma_en2"]) == Backend("jaccl", True)
    assert ring(True) == Backend("ring", True)
    assert "pip install -U mlx" in ring(False).what_to_do


def test_a_variable_that_does_harm_is_a_warning() -> None:
    assert "MLX_METAL_FAST_SYNCH" in doctor.warnings({"MLX_METAL_FAST_SYNCH": "1"})[0]
    assert doctor.warnings({"MLX_METAL_FAST_SYNCH": "0"}) == []


def test_the_clock_of_compute_is_that_of_a_matrix_product() -> None:
    assert 1e7 < matrix_product_rate(mx.float32, least_seconds=0.001) < 1e16


# Over links.


@pytest.mark.ring
def test_over_a_ring_the_first_rank_prints_the_contract_and_the_speeds() -> None:
    ended = run_ranks([[*DOCTOR, "--quick"]] * 2, timeout_seconds=60)
    assert [each.returncode for each in ended] == [0, 0], report(ended)
    assert ended[1].stdout == "", report(ended)
    said = ended[0].stdout
    assert "contract   ring, 2 ranks, directional lanes" in said, report(ended)
    assert "  kept      sums_beside_messages\n" in said
    assert "  left out  a_lost_peer_ends_a_sum: needs a rank to end, and is checked by the tests" in said
    assert "  left out  alternates_sizes_in_both_directions: sends 64 MB at once, and --quick" in said
    assert "broken" not in said
    assert "rank 1: " in said
    assert "promises that were checked hold over ring between 2 ranks; the slowest link, from rank" in said


@pytest.mark.ring
def test_over_a_ring_as_json() -> None:
    ended = run_ranks([[*DOCTOR, "--quick", "--json", "--lanes", "single"]] * 2, timeout_seconds=60)
    assert [each.returncode for each in ended] == [0, 0], report(ended)
    links = json.loads(ended[0].stdout)["links"]
    assert (links["backend"], links["lanes"], links["world_size"]) == ("ring", "single", 2)
    assert [outcome["promise"] for outcome in links["outcomes"]] == [
        promised.name for promised in (*PROMISES, *ENDINGS)
    ]
    assert [(speed["source"], speed["to"]) for speed in links["speeds"]] == [(0, 1), (1, 0)]
    for speed in links["speeds"]:
        assert speed["latency_seconds"] > 0
        assert 0 < speed["bytes_per_second"][str(MIB)] < 1e12
    assert [facts["machine"]["memory_bytes"] > 2**30 for facts in json.loads(ended[0].stdout)["ranks"]] == [True] * 2
    assert [sorted(rates) for rates in links["compute"]] == [["bfloat16", "float32"]] * 2


@pytest.mark.ring
def test_a_rank_that_ends_breaks_the_contract_of_the_others() -> None:
    ends = "import os; from transports import RingWorld; RingWorld(); os._exit(0)"
    ended = run_ranks([[*DOCTOR, "--quick"], ["-c", ends]], timeout_seconds=60)
    assert ended[0].returncode == 3, report(ended)
    assert "  broken    arrives_bit_for_bit_in_every_dtype: PeerLost: [rank 0]" in ended[0].stdout, report(ended)
    assert "verdict    Do not train over these links: arrives_bit_for_bit" in ended[0].stdout


@pytest.mark.ring
def test_a_rank_that_stays_away_is_named_within_the_timeout() -> None:
    stays = "import time; from transports import RingWorld; RingWorld(timeout_seconds=2); time.sleep(60)"
    first, _ = run_ranks(
        [[*DOCTOR, "--quick", "--timeout", "2"], ["-c", stays]], timeout_seconds=40, not_waited_for=[1]
    )
    assert first.returncode == 4, first.stderr
    assert "rank 1 is there and waited for nobody" in first.stdout + first.stderr


@pytest.mark.ring
def test_links_are_examined_with_checked_messages_if_asked_for() -> None:
    ended = run_ranks([[*DOCTOR, "--quick", "--json", "--check-messages"]] * 2, timeout_seconds=60)
    assert [each.returncode for each in ended] == [0, 0], report(ended)
    outcomes = {each["promise"]: each for each in json.loads(ended[0].stdout)["links"]["outcomes"]}
    # Not that it does not check messages, as without the flag; a refusal needs a run of its own.
    assert outcomes["refuses_another_shape"]["why"].startswith("ends the run that checks it")


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf", "soon"])
def test_a_wrong_timeout_is_refused(timeout: str, capsys) -> None:
    assert main(["doctor", "--timeout", timeout]) == 2
    assert "--timeout" in capsys.readouterr().err


def test_a_dishonest_link_is_named_by_the_first_promise_that_it_breaks() -> None:
    links = doctor.examine(LiarWorld(liars.AveragesFloats), "loopback", quick=True)
    results = {outcome.promise: outcome.result for outcome in links.outcomes}
    assert [outcome.promise for outcome in links.broken] == ["sums_by_definition"]
    assert results["sums_beside_messages"] == "kept"
    assert results["keeps_barriers"] == "left out"
    assert (links.speeds, links.compute) == ([], [])
    assert doctor.verdict(links).startswith("Do not train over these links: sums_by_definition is broken (Contract")


def test_an_honest_link_keeps_everything_that_was_chosen() -> None:
    world = LiarWorld(Honest)
    links = doctor.examine(world, "loopback", quick=True)
    expected = [p.name for p in in_one_run(LiarWorld(Honest).transport(0)) if not p.is_large]
    assert [outcome.promise for outcome in links.outcomes if outcome.result == "kept"] == expected
    assert len(links.speeds) == 2
    assert links.facts == [doctor.Facts.look()] * 2


@pytest.mark.parametrize(
    ("lanes", "promise", "why"),
    [
        ("single", "sends_any_number_in_the_background", "speaks of directional lanes, and these are single"),
        ("single", "sends_in_the_background", "speaks of directional lanes, and these are single"),
        ("directional", "arrives_beyond_two_gigabytes", "ask for --heavy"),
        ("directional", "arrives_whatever_its_size", "sends 20 MB at once, and --quick was asked for"),
    ],
)
def test_what_is_left_out_has_its_reason(lanes: str, promise: str, why: str) -> None:
    transport = LoopbackWorld(2, lanes=lanes).transport(0)
    chosen = [each.name for each in doctor.choose(transport, quick=True, heavy=False)]
    found = next(each for each in PROMISES if each.name == promise)
    assert promise not in chosen
    assert why in doctor.why_left_out(found, transport)


def test_refusals_are_left_out_where_nothing_is_checked_and_where_they_would_end_the_run() -> None:
    refusal = next(each for each in PROMISES if each.name == "refuses_another_shape")
    liar = LiarWorld(Honest).transport(0)
    assert refusal not in doctor.choose(liar, quick=False, heavy=True)
    assert "ends the run" in doctor.why_left_out(refusal, liar)


def test_heavy_promises_are_chosen_where_they_are_asked_for() -> None:
    transport = LoopbackWorld(2).transport(0)
    heavy = {each.name for each in doctor.choose(transport, quick=False, heavy=True)}
    light = {each.name for each in doctor.choose(transport, quick=False, heavy=False)}
    assert heavy - light == {"arrives_beyond_two_gigabytes"}


def test_the_report_as_text() -> None:
    machine = Machine("macOS 26.3 (arm64)", "Apple M4 Max", "gpu", 128 << 30, 96 << 30, {"mlx": "0.32.4"})
    speeds = [
        LinkSpeed(0, 1, 0.0004, {MIB: 1.5e9, 64 * MIB: 4.25e9}),
        LinkSpeed(1, 0, 0.0005, {MIB: 1e9, 64 * MIB: 4e9}),
    ]
    outcomes = [doctor.Outcome("keeps_barriers", "kept"), doctor.Outcome("sends", "left out", "because")]
    links = doctor.Links("ring", "directional", 2, outcomes, speeds, [{"float32": 1.5e13}, {"float32": 2e12}])
    facts = doctor.Facts(machine, [Backend("ring", True)], [])
    said = doctor.Report([facts], ["Mind."], links, doctor.verdict(links))
    assert (
        "\n".join(doctor.lines(said))
        == """\
machine    macOS 26.3 (arm64)
chip       Apple M4 Max, MLX computes on its gpu
memory     128.0 GiB, wired limit 96.0 GiB
mlx        0.32.4

transports ring      yes

contract   ring, 2 ranks, directional lanes
  kept      keeps_barriers
  left out  sends: because

links      from  to    latency        1 MB       64 MB
              0   1   0.400 ms   1.50 GB/s   4.25 GB/s
              1   0   0.500 ms   1.00 GB/s   4.00 GB/s

compute    rank 0: 15,000 GFLOP/s in float32
           rank 1: 2,000 GFLOP/s in float32

warning    Mind.

verdict    All 1 promises that were checked hold over ring between 2 ranks; the slowest link, from rank 1 to rank 0, \
carries 4.00 GB/s in messages of 64 MB."""
    )


def facts(system: str, chip: str, mlx: str, *told: str, has_jaccl: bool = True) -> doctor.Facts:
    versions = {"python": "3.12.1", "mlx": mlx, "mlx-lm": "0.32.2", "pptrain": "0.1.0"}
    rdma_class = frame_class(system.removeprefix("macOS "))
    machine = Machine(system, chip, "gpu", 128 << 30, 96 << 30, versions, rdma_class)
    return doctor.Facts(machine, [Backend("jaccl", has_jaccl, "" if has_jaccl else "old", "Update.")], list(told))


def test_the_facts_of_all_ranks_stand_side_by_side() -> None:
    ranks = [facts("macOS 26.3", "M4 Max", "0.32.4"), facts("macOS 26.2.1", "M3", "0.32.4", has_jaccl=False)]
    said = doctor.Report(ranks, [], None, "Fine.")
    assert (
        "\n".join(doctor.lines(said))
        == """\
           rank 0                           rank 1
machine    macOS 26.3                       macOS 26.2.1
chip       M4 Max, MLX computes on its gpu  M3, MLX computes on its gpu
memory     128.0 GiB, wired limit 96.0 GiB  128.0 GiB, wired limit 96.0 GiB
python     3.12.1                           3.12.1
mlx        0.32.4                           0.32.4
mlx-lm     0.32.2                           0.32.2
pptrain    0.1.0                            0.1.0

transports jaccl     yes
           jaccl on rank 1 no: old. Update.

verdict    Fine."""
    )


def test_what_differs_between_ranks_is_a_warning() -> None:
    one, other = facts("macOS 26.3", "M4 Max", "0.32.4"), facts("macOS 26.2", "M3", "0.32.5")
    assert doctor.differences([one, one]) == []
    found = doctor.differences([one, other, one])
    assert [line.split(" differs: ")[0] for line in found] == ["system", "size of RDMA frames", "chip", "mlx"]
    assert "rank 0 has 0.32.4, rank 1 has 0.32.5, rank 2 has 0.32.4. Install the same version" in found[-1]
    assert doctor.differences([one, facts("macOS 26.4", "M4 Max", "0.32.4")]) == [
        "system differs: rank 0 has macOS 26.3, rank 1 has macOS 26.4. Train, but look here first if ranks differ in "
        "what they do."
    ]


def test_a_warning_names_its_rank() -> None:
    links = doctor.Links("ring", "single", 2, [doctor.Outcome("a", "kept")], [LinkSpeed(0, 1, 1, {MIB: 1})])
    links.facts.extend([facts("macOS 26.3", "M3", "0.32.4"), facts("macOS 26.3", "M3", "0.32.4", "Mind.")])
    assert doctor.Report.of(links).warnings == ["rank 1: Mind."]
