"""Which check of the contract catches which dishonest transport."""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from itertools import permutations

import backends
import liars
import pytest
from liar_world import Honest, LiarWorld
from processes import ROOT

from transports import LoopbackWorld, TransportError
from transports.contract import PROMISES, ContractBroken, Promise, in_one_run

CHECKS = """
    a arrives_bit_for_bit_in_every_dtype
    b arrives_whatever_its_size
    c arrives_beyond_two_gigabytes
    d arrives_though_not_contiguous
    e keeps_order_in_each_direction
    f evaluates_a_lazy_array_once
    g takes_the_value_at_the_call
    h alternates_sizes_in_both_directions
    i sends_in_the_background
    j sends_any_number_in_the_background
    k receives_into_a_graph
    l orders_receives_by_their_arrival
    m delivers_a_dropped_send
    n sums_beside_messages
    o sums_by_definition
    p sums_whoever_comes_last
    q sums_to_the_same_bits_on_every_rank
    r keeps_barriers
    s keeps_to_neighbours
    t refuses_another_shape
    u refuses_another_dtype
    v delivers_what_was_sent_before_close
    w refuses_work_after_close
"""

# x: caught. X: caught, where PPTRAIN_HEAVY asks for it. Blank: large, and the liar does not lie about sizes; not tried.
TABLE = """
                          abcdefghijklmnopqrstuvw
    Honest                .. ....................
    RoundsBfloat16        x  ....  ..............
    FlipsNegativeZero     x  ....  ..............
    CountsInWords         xx ....xx..............
    CutsLargeMessages     .x ....xx..............
    CountsBytesIn31Bits   . X....  ..............
    ForgetsEmptyMessages  .x ....xx..............
    IgnoresStrides        .  x...  ..............
    Overtakes             .  .x..  x.x.........x.
    HoldsBack             .  ....  ..............
    EvaluatesLater        .  ..x.  ..............
    KeepsAReference       .  ...x  ..............
    LosesWhatItClosesOn   .  ....  ............x.
    LosesDroppedSends     .  ....  ...xx.......x.
    EvaluatesTwice        .  ..x.  ..............
    WaitsForItsReceiver   .. .....xx.............
    HasThirtyPlaces       .. ......x.............
    HandsOverACopy        .  ....  .xx...........
    OrdersByBuilding      .  ....  ..x...........
    ChecksDtypesOnly      .  ....  ..........xx..
    ChecksShapesOnly      .  ....  ..........xx..
    DisturbsSums          .  ....  ....x.........
    AveragesFloats        .  ....  .....x........
    GivesUpOnTheLate      .  ....  ......x.......
    AddsItsOwnFirst       .  ....  .......x......
    CountsLeftAndRight    .  ....  ....xxxx......
    BarrierDoesNotWait    .  ....  ........x.....
    AcceptsAnyRank        .  ....  .........x....
    RefusesWithoutReason  .  ....  .........x....
    LosesMessagesAcross   .  ....  .........x....
    ClosesSilently        .  ....  .............x
    ClosesOnlyOnce        .  ....  ............xx
"""

HEADER, *ROWS = TABLE.strip("\n").splitlines()
LETTERS = HEADER.strip()
COLUMN = HEADER.index("a")
PROMISE_BY_LETTER = dict(zip(LETTERS, PROMISES, strict=True))
CAUGHT = {row.split()[0]: row[COLUMN:].ljust(len(LETTERS)) for row in ROWS}


def catches(promise: Promise, liar: type[Honest]) -> bool:
    world = LiarWorld(liar)
    try:
        world.run({rank: promise.check(world.transport(rank)) for rank in world.local_ranks})
    except (ContractBroken, TransportError):
        return True
    return False


def test_the_table_has_every_promise_and_every_liar() -> None:
    legend = [line.split() for line in CHECKS.strip().splitlines()]
    assert legend == [[letter, promise.name] for letter, promise in PROMISE_BY_LETTER.items()]
    kinds = [each for _, each in inspect.getmembers(liars, inspect.isclass) if issubclass(each, Honest)]
    assert sorted(CAUGHT) == sorted(each.__name__ for each in kinds)


@pytest.mark.parametrize("name", CAUGHT)
def test_each_liar_is_caught_by_the_checks_of_the_table(name: str) -> None:
    tried = {letter: cell for letter, cell in zip(LETTERS, CAUGHT[name], strict=True) if cell in "x."}
    found = {letter: ".x"[catches(PROMISE_BY_LETTER[letter], getattr(liars, name))] for letter in tried}
    assert found == tried


def test_an_honest_transport_is_caught_by_none() -> None:
    assert set(CAUGHT["Honest"]) == {".", " "}
    assert set(CAUGHT["HoldsBack"]) == {".", " "}


@pytest.mark.parametrize("letter", LETTERS)
def test_each_promise_has_a_liar_that_it_catches(letter: str) -> None:
    assert {row[LETTERS.index(letter)] for row in CAUGHT.values()} & {"x", "X"}


@pytest.mark.skipif(not os.environ.get("PPTRAIN_HEAVY"), reason="takes 16 GiB of memory; asked for by PPTRAIN_HEAVY=1")
def test_counting_bytes_in_31_bits_is_caught() -> None:
    assert not catches(PROMISE_BY_LETTER["c"], Honest)
    assert catches(PROMISE_BY_LETTER["c"], liars.CountsBytesIn31Bits)


def test_the_table_of_promises_and_backends_is_what_the_tests_run() -> None:
    """Printed by `python tests/backends.py`."""
    assert backends.table() in (ROOT / "transports" / "README.md").read_text()


# What runs the contract can rely on.


class NotesLabels(Honest):
    """What each rank calls its messages, by the link that they go over."""

    def __init__(self, inner):
        super().__init__(inner)
        self.sent = defaultdict[tuple[int, int], list[str]](list)
        self.received = defaultdict[tuple[int, int], list[str]](list)

    def send(self, array, to, label=""):
        sent = super().send(array, to, label)
        self.sent[self.rank, to].append(label)
        return sent

    def arrive(self, receive):
        self.received[receive.source, self.rank].append(receive.label)
        return super().arrive(receive)


@pytest.mark.parametrize("promise", [each for each in PROMISES if not each.is_large], ids=lambda each: each.name)
def test_both_ends_call_a_message_the_same(promise: Promise) -> None:
    world = LiarWorld(NotesLabels, 3)
    world.run({rank: promise.check(world.transport(rank)) for rank in world.local_ranks})
    for source, to in permutations(world.local_ranks, 2):
        assert world.transport(source).sent[source, to] == world.transport(to).received[source, to]


@pytest.mark.parametrize("lanes", ["single", "directional"])
def test_what_can_be_checked_in_one_run_can_be(lanes: str) -> None:
    world = LoopbackWorld(2, lanes=lanes)
    promises = [promise for promise in in_one_run(world.transport(0)) if not promise.is_large]
    for promise in promises:
        world.run({rank: promise.check(world.transport(rank)) for rank in world.local_ranks})
    assert promises[-1].name == "refuses_work_after_close"


def test_a_promise_concerns_the_transports_that_it_speaks_of() -> None:
    by_name = {promise.name: promise for promise in PROMISES}
    single, checked = LoopbackWorld(2, lanes="single").transport(0), LiarWorld(Honest).transport(0)
    assert not by_name["sends_in_the_background"].concerns(single)
    assert by_name["sends_in_the_background"].concerns(checked)
    assert by_name["refuses_another_shape"].concerns(checked)
