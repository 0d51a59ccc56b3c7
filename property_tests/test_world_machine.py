"""A state machine: ranks are told one by one what to do, and the world is stepped in between.

The model is the plainest one: for each link a list of what was sent over it, of which what has come is the beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import permutations

import mlx.core as mx
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from strategies import examples

from transports import Lanes, LoopbackWorld, Task
from transports.faults import Stalls
from transports.operations import Flush

Pair = tuple[int, int]
RANKS = 3
PAIRS = list(permutations(range(RANKS), 2))


class Told(RuleBasedStateMachine):
    """Messages have the value of their place on their link, and a sum that of its place among the sums."""

    steps: Iterator[int] | None = None

    @initialize(
        place=st.sampled_from([("directional", None), ("directional", 1), ("directional", 0), ("single", None)]),
        seed=st.integers(0, 2**16),
        latency=st.dictionaries(st.sampled_from(PAIRS), st.sampled_from([0.5, 2.0])),
        stalls=st.lists(st.builds(Stalls, st.just(0), st.just(1), st.integers(0, 5), st.just(3.0)), max_size=2),
        is_checked=st.booleans(),
    )
    def build(
        self, place: tuple[Lanes, int | None], seed: int, latency: dict[Pair, float], stalls: list, is_checked: bool
    ) -> None:
        lanes, capacity = place
        self.world = LoopbackWorld(
            RANKS,
            lanes=lanes,
            capacity=capacity,
            seed=seed,
            latency_seconds=latency,
            durations=1.0,
            faults=stalls,
            check_messages=is_checked,
        )
        self.sent = {pair: list[int]() for pair in PAIRS}
        self.asked = dict.fromkeys(PAIRS, 0)
        self.came = {pair: list[int]() for pair in PAIRS}
        self.num_sums = 0
        self.sums = [list[int]() for _ in range(RANKS)]
        self.orders = [deque[Pair | None]() for _ in range(RANKS)]
        self.is_over = False
        self.steps = self.world.steps({rank: self.obey(rank) for rank in range(RANKS)})

    def obey(self, rank: int) -> Task[None]:
        transport = self.world.transport(rank)
        num_sent = dict.fromkeys(PAIRS, 0)
        while self.orders[rank] or not self.is_over:
            if not self.orders[rank]:
                yield Flush(0.0, [])  # Over at once: it looks again when it is next chosen.
                continue
            pair = self.orders[rank].popleft()
            transport.stand_at(f"{pair}")
            if pair is None:
                total = transport.all_sum(mx.array(len(self.sums[rank])))
                yield total
                self.sums[rank].append(total.array.item())
            elif pair[0] == rank:
                yield transport.send(mx.array(num_sent[pair]), pair[1])
                num_sent[pair] += 1
            else:
                receive = transport.receive((), mx.int32, pair[0])
                yield transport.arrive(receive)
                self.came[pair].append(receive.array.item())

    @rule(pair=st.sampled_from(PAIRS))
    def tell_to_send(self, pair: Pair) -> None:
        self.sent[pair].append(len(self.sent[pair]))
        self.orders[pair[0]].append(pair)

    @precondition(lambda self: any(self.asked[pair] < len(self.sent[pair]) for pair in PAIRS))
    @rule(data=st.data())
    def tell_to_receive(self, data: st.DataObject) -> None:
        self.ask(data.draw(st.sampled_from([pair for pair in PAIRS if self.asked[pair] < len(self.sent[pair])])))

    @precondition(lambda self: all(self.asked[pair] == len(self.sent[pair]) for pair in PAIRS))
    @rule()
    def tell_to_sum(self) -> None:
        self.num_sums += 1
        for orders in self.orders:
            orders.append(None)

    @rule(count=st.integers(1, 20))
    def step(self, count: int) -> None:
        for _ in range(count):
            next(self.steps)

    @invariant()
    def what_came_is_the_beginning_of_what_was_sent(self) -> None:
        for pair in PAIRS:
            assert self.came[pair] == self.sent[pair][: len(self.came[pair])]
        for sums in self.sums:
            assert sums == [RANKS * place for place in range(len(sums))]

    def ask(self, pair: Pair) -> None:
        self.asked[pair] += 1
        self.orders[pair[1]].append(pair)

    def teardown(self) -> None:
        if self.steps is None:
            return
        for pair in PAIRS:
            for _ in range(len(self.sent[pair]) - self.asked[pair]):
                self.ask(pair)
        self.is_over = True
        for _ in self.steps:
            pass
        assert self.came == self.sent
        assert [len(sums) for sums in self.sums] == [self.num_sums] * RANKS


TestTold = Told.TestCase
TestTold.settings = examples(0.2)  # Each of up to 50 rules.
