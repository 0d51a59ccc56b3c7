"""Dishonest transports that tell something else than that a peer is lost, or silent."""

from __future__ import annotations

import re

from liar_world import Honest, or_nothing

from transports import PeerLost, TransportTimeout
from transports.operations import Flush, Send


class TakesLossForAMessage(Honest):
    """Lets a wait that failed be over, with whatever is in the buffer."""

    def fail_wait(self, error):
        return None

    def send(self, array, to, label=""):
        return self._or_nothing(lambda: self.inner.send(array, to, label))

    def flush(self):
        return self._or_nothing(self.inner.flush)

    def all_sum(self, array, label=""):
        return self._or_nothing(lambda: self.inner.all_sum(array, label))

    def _or_nothing(self, act):
        return or_nothing(act)


class SendsIntoTheVoid(TakesLossForAMessage):
    """Hands messages to a peer that is not there, and does not look what becomes of them."""

    def __init__(self, inner):
        super().__init__(inner)
        self.is_sending = False

    def begin_wait(self, wait):
        self.is_sending = isinstance(wait, Send | Flush)
        return wait

    def fail_wait(self, error):
        return None if self.is_sending else error

    def _or_nothing(self, act):
        return super()._or_nothing(act) if self.is_sending else act()


class TakesSilenceForLoss(Honest):
    """Gives a peer up as lost that is only silent."""

    def fail_wait(self, error):
        return PeerLost(str(error)) if isinstance(error, TransportTimeout) else error


class TakesLossForSilence(Honest):
    """Cannot tell that a peer has ended, and says that it waited for it in vain."""

    def fail_wait(self, error):
        return TransportTimeout(f"waited 10 s: {error}") if type(error) is PeerLost else error


class NamesNoPeer(Honest):
    """Says that a peer is gone, and not which."""

    def fail_wait(self, error):
        return type(error)(re.sub(r"rank \d+", "a peer", str(error)))


class BlamesItsNeighbour(Honest):
    """Names the rank that ended because of the first one."""

    world_size_for_this = 3

    def fail_wait(self, error):
        return type(error)(re.sub(rf"rank {self.world_size - 1}", "rank 1", str(error)))


class DoesNotSayHowLong(Honest):
    """Says that it waited in vain, and not for how long."""

    def fail_wait(self, error):
        return type(error)(re.sub(r"[\d.]+ s\b", "some time", str(error)))


class TellsTooLate(Honest):
    """Keeps a failure to itself for an hour, as TCP by itself would."""

    told_at: float | None = None

    def fail_wait(self, error):
        self.told_at = self.clock() + 3600
        return error

    def clock(self):
        return self.told_at or super().clock()


class WorksOnAfterAnError(Honest):
    """Takes messages as if nothing had happened."""

    def send(self, array, to, label=""):
        return or_nothing(lambda: super(WorksOnAfterAnError, self).send(array, to, label))
