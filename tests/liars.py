"""Dishonest transports: each breaks a promise of the contract in a way in which a real transport could."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from liar_world import HoldsBack, Honest, Later, Through, or_nothing

from transports import Receive, Sum, TransportClosed, TransportError
from transports.buffers import array_from, bytes_of, poisoned
from transports.links import Link

# What arrives is not what was sent.


class RoundsBfloat16(Honest):
    """Goes by way of float16, as a backend without bfloat16 would."""

    def send(self, array, to, label=""):
        is_bfloat16 = array.dtype == mx.bfloat16
        return super().send(array.astype(mx.float16).astype(array.dtype) if is_bfloat16 else array, to, label)


class FlipsNegativeZero(Honest):
    """Copies by adding 0, which makes 0.0 of -0.0."""

    def send(self, array, to, label=""):
        return super().send(array + 0 if mx.issubdtype(array.dtype, mx.floating) else array, to, label)


class CountsInWords(Honest):
    """Sends four bytes at a time, and loses up to three at the end."""

    def send(self, array, to, label=""):
        return super().send(cut(array, array.nbytes // 4 * 4), to, label)


class CutsLargeMessages(Honest):
    """Has a buffer of 16 MiB, and loses what is beyond."""

    def send(self, array, to, label=""):
        return super().send(cut(array, 16 << 20), to, label)


class CountsBytesIn31Bits(Honest):
    """Loses what lies beyond 2 GiB."""

    def send(self, array, to, label=""):
        return super().send(cut(array, (1 << 31) - 1), to, label)


def cut(array: mx.array, size: int) -> mx.array:
    """The array with only its first bytes, and 0 for the others."""
    if array.nbytes <= size:
        return array
    data = bytes_of(array)
    data[size:] = 0
    return array_from(data, array.shape, array.dtype)


class ForgetsEmptyMessages(Honest):
    """Sends nothing where there are 0 bytes, while its receiver takes the next message for it."""

    def send(self, array, to, label=""):
        return super().send(array, to, label) if array.size else self.flush()


class IgnoresStrides(Honest):
    """Takes every array's memory for contiguous."""

    def send(self, array, to, label=""):
        if array.dtype != mx.int32 or array.ndim != 2:
            return super().send(array, to, label)
        mx.eval(array)
        shown = np.asarray(array, copy=False)
        in_memory = np.lib.stride_tricks.as_strided(shown, shown.shape, (4 * shown.shape[1], 4))
        return super().send(mx.array(in_memory), to, label)


class NewestFirst(Link):
    """Hands over the newest message where it looks like the oldest."""

    def take(self, at):
        if self.wire[0].message.form == self.wire[-1].message.form:
            self.wire.rotate(1)
        return super().take(at)


class Overtakes(Honest):
    """Later messages come before earlier ones, as over two streams at once."""

    link = NewestFirst


# A send is not what the sender takes it for.


class EvaluatesLater(HoldsBack):
    """Keeps a lazy array as it is, and evaluates it when it goes."""

    def keep(self, array):
        return mx.array(array)


class KeepsAReference(HoldsBack):
    """Keeps the sender's own array, which the sender can change."""

    def keep(self, array):
        mx.eval(array)
        return array


class LosesWhatItClosesOn(HoldsBack):
    """Forgets at its close what has not left yet."""

    def close(self):
        self.held.clear()
        super().close()


class LosesDroppedSends(HoldsBack):
    """Sends when somebody waits for it, and never if nobody does."""

    def release(self):
        pass

    def begin_wait(self, wait):
        if isinstance(wait, Later):
            Honest.send(self, *wait.message)
        return super().begin_wait(wait)


class EvaluatesTwice(Honest):
    """Computes the sender's graph for itself, and leaves the sender's array to be computed again."""

    def send(self, array, to, label=""):
        mx.enable_compile()
        try:
            own = mx.compile(lambda: array)()
            mx.eval(own)
        finally:
            mx.disable_compile()
        return super().send(own, to, label)


class WaitsForItsReceiver(Honest):
    """Has lanes for both directions, but each send waits until it is received."""

    capacity = 0

    def send(self, array, to, label=""):
        super().send(array, to, label)
        return self.flush()


class HasThirtyPlaces(Honest):
    """Sends in the background, thirty messages at most."""

    capacity = 30

    def send(self, array, to, label=""):
        super().send(array, to, label)
        return self.flush()


# A receive is not what the receiver takes it for.


class HandsOverACopy(Honest):
    """Puts another array in place of the one that was built into graphs."""

    def __init__(self, inner):
        super().__init__(inner)
        self.expected = list[Through]()

    def receive(self, shape, dtype, source, label=""):
        return Through(poisoned(shape, dtype), super().receive(shape, dtype, source, label))

    def arrive(self, receive):
        receive.wait = super().arrive(receive.inner)
        self.expected.append(receive)
        return receive.wait

    def end_wait(self, wait):
        for receive in [each for each in self.expected if each.wait.is_over()]:
            receive.array = receive.inner.array
            self.expected.remove(receive)


class OrdersByBuilding(Honest):
    """The receive that was built first takes the first message."""

    def __init__(self, inner):
        super().__init__(inner)
        self.built = list[tuple[int, Receive]]()

    def receive(self, shape, dtype, source, label=""):
        receive = super().receive(shape, dtype, source, label)
        self.built.append((source, receive))
        return receive

    def arrive(self, receive):
        first = next(each for each in self.built if each[0] == receive.source)
        self.built.remove(first)
        return super().arrive(first[1])


class ChecksDtypesOnly(Honest):
    """Compares dtypes and numbers of elements; where these differ, it tells of the flat arrays on its wire."""

    def send(self, array, to, label=""):
        return super().send(array.reshape(-1), to, label)

    def receive(self, shape, dtype, source, label=""):
        inner = super().receive((int(np.prod(shape)),), dtype, source, label)
        return Through(inner.array.reshape(shape), inner)

    def arrive(self, receive):
        return super().arrive(receive.inner)


class ChecksShapesOnly(Honest):
    """Takes one dtype for another of its size; where shapes differ, it tells of the integers on its wire."""

    UNSIGNED = (mx.uint8, mx.uint16, mx.uint32, mx.uint64)

    def send(self, array, to, label=""):
        return super().send(array.view(self._unsigned(array.dtype)), to, label)

    def receive(self, shape, dtype, source, label=""):
        inner = super().receive(shape, self._unsigned(dtype), source, label)
        return Through(inner.array.view(dtype), inner)

    def arrive(self, receive):
        return super().arrive(receive.inner)

    def _unsigned(self, dtype: mx.Dtype) -> mx.Dtype:
        return next(each for each in self.UNSIGNED if each.size == dtype.size)


# A sum is none, or a barrier.


class DisturbsSums(Honest):
    """Every tenth sum beside messages has a wrong addend."""

    def __init__(self, inner):
        super().__init__(inner)
        self.has_sent, self.sums = False, 0

    def send(self, array, to, label=""):
        self.has_sent = True
        return super().send(array, to, label)

    def all_sum(self, array, label=""):
        self.sums += self.has_sent
        is_disturbed = self.has_sent and self.sums % 10 == 0
        self.has_sent = False
        return super().all_sum(array + 1 if is_disturbed else array, label)


class AveragesFloats(Honest):
    """Divides by the number of ranks, as gradients are often wanted."""

    def all_sum(self, array, label=""):
        is_float = mx.issubdtype(array.dtype, mx.floating)
        return super().all_sum(array / self.world_size if is_float else array, label)


class GivesUpOnTheLate(Honest):
    """Sums without a rank that lets the others wait for 45 ms."""

    def __init__(self, inner):
        super().__init__(inner)
        self.resumed_at = self.clock()

    def all_sum(self, array, label=""):
        is_late = self.clock() - self.resumed_at > 0.045
        return super().all_sum(mx.zeros_like(array) if is_late else array, label)

    def end_wait(self, wait):
        self.resumed_at = self.clock()


class AddsItsOwnFirst(Honest):
    """Each rank adds in another order: its own addend first, then the others' around the ring."""

    world_size_for_this = 3

    def __init__(self, inner):
        super().__init__(inner)
        self.sums = list[Sum]()

    def all_sum(self, array, label=""):
        rows = [array if rank == self.rank else mx.zeros_like(array) for rank in range(self.world_size)]
        self.sums.append(super().all_sum(mx.stack(rows), label))
        return self.sums[-1]

    def end_wait(self, wait):
        if wait in self.sums:
            rows = [wait.array[(self.rank + step) % self.world_size] for step in self.steps()]
            wait.array = sum(rows[1:], start=rows[0])

    def steps(self):
        return range(self.world_size)


class CountsLeftAndRight(AddsItsOwnFirst):
    """Adds what its two neighbours have, which with two ranks is one and the same."""

    world_size_for_this = 2

    def steps(self):
        return -1, 0, 1


class BarrierDoesNotWait(Honest):
    """Takes what it has sent itself for everybody's arrival."""

    def barrier(self):
        return self.flush()


# Links that are none, and ends.


class AcceptsAnyRank(Honest):
    """Takes messages to ranks that there are none of."""

    def send(self, array, to, label=""):
        return super().send(array, to, label) if self._is_peer(to) else self.flush()

    def _is_peer(self, rank: int) -> bool:
        return 0 <= rank < self.world_size and rank != self.rank


class RefusesWithoutReason(Honest):
    """Says only that something failed."""

    def send(self, array, to, label=""):
        try:
            return super().send(array, to, label)
        except TransportClosed:
            raise
        except TransportError as error:
            raise TransportError("Operation failed with status 12.") from error


class LosesMessagesAcross(Honest):
    """Accepts messages to ranks that are no neighbours, and has no way to get them there."""

    world_size_for_this = 4

    def send(self, array, to, label=""):
        is_lost = 0 <= to < self.world_size and (to - self.rank) % self.world_size == 2
        return self.flush() if is_lost else super().send(array, to, label)


class ClosesSilently(Honest):
    """Does nothing after its close, without an error."""

    def send(self, array, to, label=""):
        return or_nothing(lambda: super(ClosesSilently, self).send(array, to, label))

    def receive(self, shape, dtype, source, label=""):
        return or_nothing(lambda: super(ClosesSilently, self).receive(shape, dtype, source, label))

    def all_sum(self, array, label=""):
        return or_nothing(lambda: super(ClosesSilently, self).all_sum(array, label))


class ClosesOnlyOnce(Honest):
    """Takes a second close for a mistake."""

    def close(self):
        self.flush()
        super().close()
