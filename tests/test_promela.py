"""The verifier against the model checker SPIN, which judges the same programs from their text in Promela."""

import itertools
import os
import random
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial

import pytest
from verifier_mutants import CAPACITIES, Case, mutants, valid_cases

from pptrain.notation import parse_program
from pptrain.program import Message, Send
from pptrain.promela import promela

MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
needs_spin = pytest.mark.skipif(
    bool(MISSING) and os.environ.get("CI") != "true", reason=f"not installed: {', '.join(MISSING)}"
)


def spin(case, directory):
    """What SPIN says of a case: whether it is deadlock-free, and whether everything holds."""
    directory.mkdir()
    model = promela(
        case.programs,
        case.placement,
        case.num_microbatches,
        capacity=case.capacity,
        lanes=case.lanes,
        cotangents=case.cotangents,
        is_training=case.is_training,
    )
    (directory / "model.pml").write_text(model)
    run = partial(
        subprocess.run, cwd=directory, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert "rror" not in run(["spin", "-a", "model.pml"]).stdout
    run(["gcc", "-O0", "-w", "-DSAFETY", "-DVECTORSZ=4096", "-o", "pan", "pan.c"])
    # -A leaves the assertions out, so that only deadlocks are left; -q finds what is left in a channel at the end.
    deadlock_free, right = (_found_nothing(run(["./pan", "-w16", flag]).stdout) for flag in ("-A", "-q"))
    shutil.rmtree(directory)
    return deadlock_free, right


def _found_nothing(output):
    assert "max search depth too small" not in output
    assert "out of memory" not in output
    [errors] = re.findall(r"errors: (\d+)", output)
    return errors == "0"


def agree(case, directory):
    """Both verdicts of SPIN are the verifier's; the verifier's one."""
    verdicts = case.verify()
    assert spin(case, directory) == (bool(verdicts.deadlock_free), bool(verdicts)), f"{case}{verdicts}"
    return bool(verdicts)


def agree_on_all(cases, directory):
    """How many of the cases both call right."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return sum(threads.map(lambda item: agree(item[1], directory / str(item[0])), enumerate(cases)))


def small(cases):
    """One case of each schedule, placement and lanes: the largest, with the capacities in turn."""
    kinds = {(case.schedule, case.placement, case.lanes): case for case in cases}
    return [replace(case, capacity=c) for case, c in zip(kinds.values(), itertools.cycle(CAPACITIES), strict=False)]


@needs_spin
def test_spin_accepts_every_schedule(tmp_path):
    cases = small(case for case in valid_cases() if not case.schedule.endswith("+parts"))
    assert agree_on_all(cases, tmp_path) == len(cases) >= 60


@cache
def varied_mutants(number):
    """Mutants of which as many are still right as break any one claim alone, or any other set of claims."""
    groups = dict[tuple[str, ...], list[Case]]()
    for _, case in mutants(list(valid_cases()), 10 * number, random.Random(1)):
        groups.setdefault(tuple(case.verify().broken), []).append(case)
    in_turn = [case for cases in itertools.zip_longest(*groups.values()) for case in cases if case]
    return groups, in_turn[:number]


def test_the_mutants_for_spin_are_right_or_wrong_in_every_way():
    groups, chosen = varied_mutants(320)
    assert len(chosen) == 320
    assert {(), ("ordered",), ("matched",), ("complete",), ("order_consistent",), ("deadlock_free",)} <= set(groups)
    assert min(sum(tuple(case.verify().broken) == kind for case in chosen) for kind in groups if len(kind) < 2) >= 10


@needs_spin
@pytest.mark.parametrize("part", range(4))
def test_spin_and_the_verifier_agree_on_320_mutants(tmp_path, part):
    cases = varied_mutants(320)[1][part::4]
    assert agree_on_all(cases, tmp_path) == sum(not case.verify().broken for case in cases)


BOTH_SEND_FIRST = """\
0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1
1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,3RECV_F0,3F0,1SEND_F1,3RECV_F1,3F1
"""


@needs_spin
@pytest.mark.parametrize(
    ("lanes", "capacity", "is_right"),
    [("single", 0, False), ("single", 1, True), ("single", None, True), ("directional", 0, True)],
)
def test_spin_finds_the_cycle_of_two_ranks_that_both_send_first(tmp_path, lanes, capacity, is_right):
    [example] = itertools.islice((c for c in valid_cases() if c.schedule == "evaluation"), 1)
    case = replace(
        example,
        placement=(0, 1, 0, 1),
        num_microbatches=2,
        cotangents=(),
        lanes=lanes,
        capacity=capacity,
        programs=parse_program(BOTH_SEND_FIRST),
    )
    assert agree(case, tmp_path / "model") == is_right


def test_the_model_is_written_instruction_by_instruction():
    model = promela(parse_program("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0"), (0, 1), 1, capacity=2)
    for line in (
        "chan link_0_1 = [1] of { short };",  # One message is all that there is.
        "/* 0: 0F0 */ atomic { assert(!ran_0F0); ran_0F0 = true };",
        "/* 1: 0SEND_F0 */ assert(ran_0F0); link_0_1!message_0F0;",
        "/* 2: 0RECV_B0 */ link_1_0?got; assert(got == message_1B0 && !took_1B0); took_1B0 = true;",
        "/* 2: 1I0 */ atomic { assert(!ran_1I0 && ran_1F0); ran_1I0 = true };",
        "/* 4: 1W0 */ atomic { assert(!ran_1W0 && ran_1I0); ran_1W0 = true };",
    ):
        assert line in model


def test_directional_lanes_have_a_process_for_each_peer():
    model = promela(parse_program("0F0,0SEND_F0\n1RECV_F0,1F0"), (0, 1), 1, lanes="directional", is_training=False)
    assert "queue_0_1!message_0F0" in model
    assert "active proctype sender_0_1()" in model
    assert "sender_1_0" not in model


def test_a_link_that_spin_cannot_hold_is_refused():
    program = [Send(Message(0, "F", j), 1) for j in range(300)]
    with pytest.raises(ValueError, match="300 messages"):
        promela([program, []], (0, 1), 300, capacity=None)
    assert "[0] of" in promela([program, []], (0, 1), 300, capacity=0)
