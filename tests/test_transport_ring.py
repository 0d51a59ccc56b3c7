"""The ring keeps the contract between real processes, names a peer that is lost, and refuses a wrong set-up at once."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from backends import RINGS, Backend
from processes import free_ports, report, run_ranks
from ring_rank import ENDING_TIMEOUT_SECONDS

from pptrain.cli import main
from transports import JacclWorld, LoopbackWorld, RingWorld, TransportSetupError, detect, open_world
from transports.contract import PROMISES, in_one_run
from transports.endings import ENDINGS, Ended, Ending
from transports.jaccl import frame_class
from transports.meeting import meet

RANK = str(Path(__file__).with_name("ring_rank.py"))


def arguments(backend: Backend, case: str) -> list[str]:
    """What a rank is started with."""
    return [RANK, case, backend.lanes, *["checked"][: backend.checks_messages]]


def cases(sizes: Callable[[Backend], Sequence[int]]) -> pytest.MarkDecorator:
    """Every ring, with the numbers of ranks that it is checked with."""
    found = [pytest.param(each, size, id=f"{each.name}-{size}") for each in RINGS for size in sizes(each)]
    return pytest.mark.parametrize(("backend", "world_size"), found)


@pytest.mark.ring
@cases(lambda backend: backend.world_sizes)
def test_contract(backend: Backend, world_size: int) -> None:
    ended = run_ranks([arguments(backend, "contract")] * world_size, timeout_seconds=180)
    promised = len(in_one_run(LoopbackWorld(world_size, lanes=backend.lanes).transport(0)))
    for each in ended:
        assert each.stdout.splitlines()[-1:] == [f"kept {promised} promises"], report(ended)
        assert each.returncode == 0, report(ended)


@pytest.mark.ring
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.name)
@cases(lambda backend: backend.ending_sizes)
def test_every_other_rank_ends_as_promised(backend: Backend, world_size: int, ending: Ending) -> None:
    ranks, last = [arguments(backend, f"ending:{ending.name}")] * world_size, world_size - 1
    *survivors, last = run_ranks(ranks, timeout_seconds=60, not_waited_for=[last])
    gone_at = float(last.stdout)
    for rank, each in enumerate(survivors):
        how = Ended(each.returncode or 0, each.stderr, each.ended_at - gone_at)
        ending.judge(rank, world_size, how, ENDING_TIMEOUT_SECONDS + 5)


@pytest.mark.ring
@pytest.mark.parametrize("promise", [promise.name for promise in PROMISES if promise.is_of_checks])
@cases(lambda backend: backend.refusal_sizes)
def test_a_checked_ring_refuses_a_message_of_another_form(backend: Backend, world_size: int, promise: str) -> None:
    ended = run_ranks([arguments(backend, f"promise:{promise}")] * world_size, timeout_seconds=30)
    assert [each.stdout for each in ended] == ["kept\n"] * world_size, report(ended)


@pytest.mark.ring
def test_a_checked_ring_notices_bytes_that_were_damaged_on_the_way() -> None:
    ended = run_ranks([[RANK, "damaged_on_the_way", "single", "checked"]] * 2, timeout_seconds=30)
    assert "DamagedMessage: [rank 1] from rank 0: message 1, 0F1, int32 (1000,) was sent with" in ended[1].stdout
    assert "bytes were damaged" in ended[1].stdout, report(ended)


@pytest.mark.ring
def test_four_ranks_keep_to_their_neighbours() -> None:
    ended = run_ranks([[RANK, "neighbours"]] * 4, timeout_seconds=60)
    assert [each.stdout for each in ended] == ["kept\n"] * 4, report(ended)


@pytest.mark.ring
@pytest.mark.skipif(not os.environ.get("PPTRAIN_HEAVY"), reason="takes 16 GiB of memory; asked for by PPTRAIN_HEAVY=1")
@cases(lambda backend: backend.heavy_sizes)
def test_more_than_two_gigabytes_arrive_in_pieces(backend: Backend, world_size: int) -> None:
    ended = run_ranks([arguments(backend, "two_gigabytes")] * world_size, timeout_seconds=400)
    assert [each.stdout for each in ended] == ["kept\n"] * world_size, report(ended)


@pytest.mark.ring
@pytest.mark.parametrize("lanes", ["directional", "single"])
@pytest.mark.parametrize(
    ("case", "waited_for"),
    [
        ("peer_lost_in_a_receive", "1B0 from rank 2"),
        ("peer_lost_in_a_send", "(everything sent|0F0) to leave for rank 2"),
        ("peer_lost_in_a_sum", "every rank to come to the norm"),
    ],
)
def test_a_lost_peer_is_named_with_the_place(case: str, waited_for: str, lanes: str) -> None:
    ended = run_ranks([[RANK, case, lanes]] * 3, timeout_seconds=30)
    for rank, survivor in enumerate(ended[:2]):
        lost, closed = survivor.stdout.splitlines()
        assert lost.startswith(
            f"PeerLost: [rank {rank}] rank 2 was lost first: its process has ended without a word. | "
        ), report(ended)
        assert re.search(rf"This rank stood at 1F0 \(instruction 7\), waiting for {waited_for}\. \| ", lost)
        assert closed.startswith(f"closed: [rank {rank}] this transport is closed: its first error was"), report(ended)
        assert survivor.returncode == 0, report(ended)


@pytest.mark.ring
def test_a_rank_that_is_there_but_never_comes_to_a_sum_is_named() -> None:
    *waited, _ = run_ranks([[RANK, "stays_away_from_a_sum"]] * 3, timeout_seconds=40, not_waited_for=[2])
    for rank, each in enumerate(waited):
        assert each.returncode not in (None, 0), report(waited)
        assert re.search(
            rf"TransportTimeout: \[rank {rank}\] rank [01] waited too long: 5\.\d s for every rank to come to the norm"
            r"; rank [01] waited for every rank to come to the norm; rank 2 is there and waited for nobody",
            each.stderr,
        ), report(waited)


@pytest.mark.ring
@pytest.mark.parametrize("lanes", ["directional", "single"])
def test_large_messages_go_in_pieces(lanes: str) -> None:
    ended = run_ranks([[RANK, "many_pieces", lanes, "4000"]] * 2, timeout_seconds=30)
    assert [each.stdout for each in ended] == ["True\n"] * 2, report(ended)


@pytest.mark.ring
def test_a_task_that_fails_with_sends_under_way_ends_its_process() -> None:
    ended = run_ranks([[RANK, "task_fails_with_sends_under_way"]] * 2, timeout_seconds=30)
    assert [each.stdout for each in ended] == ["ended by a mistake\n", "ended by the other one\n"], report(ended)
    assert [each.returncode for each in ended] == [0, 0], report(ended)


@pytest.mark.ring
@pytest.mark.parametrize("lanes", ["directional", "single"])
def test_a_receive_that_was_never_waited_for_is_named(lanes: str) -> None:
    ended = run_ranks([[RANK, "never_waits_for_its_receive", lanes]] * 2, timeout_seconds=30)
    for rank, each in enumerate(ended):
        assert f"UndeliveredMessage: [rank {rank}]" in each.stderr, report(ended)
        assert f"never waited for 1B0 from rank {1 - rank}" in each.stderr, report(ended)


@pytest.mark.ring
def test_only_neighbours_are_linked() -> None:
    ended = run_ranks([[RANK, "sends_across"]] * 4, timeout_seconds=60)
    for rank, each in enumerate(ended):
        neighbours = sorted([(rank - 1) % 4, (rank + 1) % 4])
        expected = f"no link leads to rank {(rank + 2) % 4}. Links lead to {neighbours}."
        assert expected in each.stdout, report(ended)


@pytest.mark.ring
def test_ranks_that_hang_are_killed_at_the_timeout() -> None:
    ended = run_ranks([["-c", "import time; time.sleep(60)"], ["-c", "print('done')"]], timeout_seconds=1)
    assert [each.returncode for each in ended] == [None, 0]
    assert ended[1].stdout == "done\n"
    assert 1 <= ended[0].seconds < 10


# A set-up that cannot work is refused before MLX waits for anybody.


def _hosts(tmp_path: Path, content: object) -> str:
    path = tmp_path / "hosts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


TWO = [["127.0.0.1:5001"], ["127.0.0.1:5002"]]


WRONG = [
    (TWO, "abc", "MLX_RANK is 'abc', but .*hosts.json .* has 2 entries: it must be from 0 to 1"),
    (TWO, "2", "MLX_RANK is '2'"),
    (TWO, "-1", "MLX_RANK is '-1'"),
    (TWO, "", "MLX_RANK is ''"),
    (TWO[:1], "0", "lists 1 of the ranks, but a group needs two ranks or more"),
    ([], "0", "lists 0 of the ranks"),
    ("", "0", "hosts.json .* is not JSON: .* empty one for a single host"),
    ("{", "0", "is not JSON"),
    ({"backend": "ring", "hosts": []}, "0", "holds a dict, .*`mlx.launch --backend ring --hostfile"),
    ([{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": []}], "0", "entry 0 is {'ssh': 'a'"),
    ([["127.0.0.1:5001"], []], "0", "entry 1 is \\[\\], but a list"),
    ([["127.0.0.1:5001"], [5]], "0", "entry 1 has the address 5"),
    ([["127.0.0.1:5001"], ["127.0.0.1"]], "0", "entry 1 has the address '127.0.0.1'"),
    ([["127.0.0.1:5001"], ["127.0.0.1:70000"]], "0", "entry 1 has the address '127.0.0.1:70000'"),
    ([["127.0.0.1:5001"], ["127.0.0.1:5001"]], "0", "entries 0 and 1 both have the address 127.0.0.1:5001"),
    ([["127.0.0.1:5001"] * 2, ["127.0.0.1:5002"]], "0", "entry 0 has the address 127.0.0.1:5001 twice"),
]


@pytest.mark.parametrize(("content", "rank", "message"), WRONG)
def test_a_wrong_host_file_or_rank_is_named(tmp_path: Path, content: object, rank: str, message: str) -> None:
    with pytest.raises(TransportSetupError, match=message):
        RingWorld(environ={"MLX_RANK": rank, "MLX_HOSTFILE": _hosts(tmp_path, content)})


@pytest.mark.parametrize(("content", "rank", "message"), WRONG)
def test_a_wrong_environment_is_one_message_and_exit_code_2(
    tmp_path: Path, monkeypatch, capsys, content: object, rank: str, message: str
) -> None:
    monkeypatch.setenv("MLX_RANK", rank)
    monkeypatch.setenv("MLX_HOSTFILE", _hosts(tmp_path, content))
    assert main(["train", "--model", "nowhere", "--data", "nowhere", "--train"]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert re.search(rf"TransportSetupError: .*{message}", said)


def test_a_ring_without_a_launcher_is_refused() -> None:
    with pytest.raises(TransportSetupError, match=r"MLX_HOSTFILE is not set.*mlx\.launch --backend ring"):
        RingWorld(environ={})
    with pytest.raises(TransportSetupError, match="Cannot read /nowhere"):
        RingWorld(environ={"MLX_RANK": "0", "MLX_HOSTFILE": "/nowhere"})


@pytest.mark.ring
def test_a_port_in_use_is_refused_within_seconds(tmp_path: Path) -> None:
    program = f"""
import json, os, socket, sys
taken = socket.socket()
taken.bind(("127.0.0.1", 0))
taken.listen()
port = taken.getsockname()[1]
json.dump([[f"127.0.0.1:{{port}}"], ["127.0.0.1:1"]], open({str(tmp_path / "used.json")!r}, "w"))
from transports import RingWorld
RingWorld(environ=os.environ)
"""
    ended = run_ranks([["-c", program]], timeout_seconds=10, environment={"MLX_HOSTFILE": str(tmp_path / "used.json")})
    assert "TransportSetupError: Cannot listen at 127.0.0.1:" in ended[0].stderr, report(ended)
    assert "Address already in use" in ended[0].stderr, report(ended)


DEVICES = [[None, "rdma_en2"], ["rdma_en2", None]]
JACCL = {"MLX_RANK": "0", "MLX_JACCL_COORDINATOR": "10.0.0.1:5000"}


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (DEVICES, {"MLX_RANK": "abc"}, "MLX_RANK is 'abc'"),
        (DEVICES, {"MLX_JACCL_COORDINATOR": ""}, "MLX_JACCL_COORDINATOR is ''"),
        (DEVICES, {"MLX_JACCL_COORDINATOR": "10.0.0.1"}, "MLX_JACCL_COORDINATOR is '10.0.0.1'"),
        (DEVICES, {"MLX_JACCL_COORDINATOR": "10.0.0.1:70000"}, "MLX_JACCL_COORDINATOR is '10.0.0.1:70000'"),
        ([["rdma_en2"], [None]], {}, "entry 0 is .*, but a list of 2 devices was expected"),
        ([[None, None], ["rdma_en2", None]], {}, "entry 0 is .*, which names no device to rank 1"),
        ([[None, "a", None, "b"]] * 4, {}, "which names no device to rank 2"),
        (
            [[None, "a", "b"], ["a", None, None], ["b", None, None]],
            {},
            "entry 1 is .*, which names no device to rank 2",
        ),
        ([[None, *["a"] * 9]] * 10, {}, "rank 0 of 10 has 9 peers, but JACCL links to 8 at most"),
        ([[None, "a", None, None]] * 4, {"MLX_JACCL_RING": "1"}, "which names no device to rank 3"),
    ],
)
def test_a_wrong_set_up_of_jaccl_is_named(
    tmp_path: Path, content: object, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(TransportSetupError, match=message):
        JacclWorld(environ={**JACCL, "MLX_IBV_DEVICES": _hosts(tmp_path, content), **changes})


@pytest.mark.skipif(sys.platform == "darwin", reason="MLX has JACCL on macOS")
def test_a_machine_without_jaccl_says_so(tmp_path: Path) -> None:
    with pytest.raises(TransportSetupError, match="no jaccl backend on this machine"):
        JacclWorld(environ={**JACCL, "MLX_IBV_DEVICES": _hosts(tmp_path, DEVICES)})


@pytest.mark.ring
def test_ranks_of_jaccl_begin_together_and_keep_the_contract_in_one_lane(tmp_path: Path) -> None:
    """Over a ring in JACCL's place: the class itself, from its environment to the end of the contract."""
    devices, [port] = _hosts(tmp_path, DEVICES), free_ports(1)
    rank = [str(Path(__file__).with_name("jaccl_rank.py")), devices, f"127.0.0.1:{port}"]
    first, second = ended = run_ranks([rank] * 2, timeout_seconds=60)
    assert [each.returncode for each in ended] == [0, 0], report(ended)
    begins, lanes = first.stdout.split()
    assert lanes == "single"
    assert float(begins) >= float(second.stdout.split()[0]), "rank 0 has not waited for rank 1"


@pytest.mark.parametrize(("value", "times"), [("1", 1), ("0", 0), ("", 0)])
def test_a_variable_that_makes_jaccl_hang_is_a_warning(tmp_path: Path, caplog, value: str, times: int) -> None:
    devices = _hosts(tmp_path, DEVICES)
    with suppress(TransportSetupError):  # Where there is no JACCL; where there is, the other rank does not come.
        JacclWorld(environ={**JACCL, "MLX_IBV_DEVICES": devices, "MLX_METAL_FAST_SYNCH": value}, start_seconds=0.1)
    assert caplog.text.count("MLX_METAL_FAST_SYNCH is set: with it deadlocks were reported") == times


@pytest.mark.parametrize(
    ("version", "expected"),
    [("26.3", "macOS 26.3 or newer"), ("26.10.1", "macOS 26.3 or newer"), ("27", "macOS 26.3 or newer")]
    + [(version, "before macOS 26.3") for version in ("26.2.9", "26", "15.7.1")],
)
def test_the_class_of_a_macos(version: str, expected: str) -> None:
    assert frame_class(version) == expected


def test_ranks_of_different_systems_do_not_begin() -> None:
    """As JACCL compares both ends' class of macOS."""
    [port] = free_ports(1)
    guest_says = list[TransportSetupError]()

    def comes() -> None:
        with pytest.raises(TransportSetupError) as error:
            meet(1, 2, ("127.0.0.1", port), "hosts", frame_class("26.2"), limit_seconds=5)
        guest_says.append(error.value)

    guest = threading.Thread(target=comes)
    guest.start()
    with pytest.raises(TransportSetupError, match="Rank 1 of 2 has not come"):
        meet(0, 2, ("127.0.0.1", port), "hosts", frame_class("26.3"), limit_seconds=5)
    guest.join()
    assert "Rank 1 has system 'before macOS 26.3', but rank 0" in str(guest_says[0])
    assert "has 'macOS 26.3 or newer'. Expected the same on every rank." in str(guest_says[0])


# What was started, and what is asked for.


@pytest.mark.parametrize(
    ("environ", "backend"),
    [
        ({}, None),
        ({"MLX_RANK": "", "MLX_HOSTFILE": ""}, None),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "hosts.json"}, "ring"),
        ({"MLX_RANK": "0", "MLX_IBV_DEVICES": "devices.json", "MLX_JACCL_COORDINATOR": "10.0.0.1:5000"}, "jaccl"),
    ],
)
def test_detects_what_the_launcher_set_up(environ: dict[str, str], backend: str | None) -> None:
    assert detect(environ) == backend


def test_a_rank_of_another_backend_does_not_run_alone() -> None:
    with pytest.raises(TransportSetupError, match=r"MLX_RANK is '1', but neither MLX_HOSTFILE .* is set"):
        detect({"MLX_RANK": "1", "MLX_WORLD_SIZE": "2", "NCCL_HOST_IP": "127.0.0.1"})


def test_opens_a_loopback() -> None:
    world = open_world("loopback", 3, lanes="single")
    assert isinstance(world, LoopbackWorld)
    assert world.world_size == 3
    assert world.transport(2).lanes == "single"


@pytest.mark.parametrize(
    ("name", "lanes", "message"),
    [
        ("rings", None, "no transport 'rings'. There are: loopback, ring, jaccl"),
        ("loopback", None, "say how many"),
        ("jaccl", "directional", "JACCL has a single lane"),
    ],
)
def test_refuses_what_cannot_be_opened(name: str, lanes: str | None, message: str) -> None:
    with pytest.raises(TransportSetupError, match=message):
        open_world(name, lanes=lanes)
