"""A loopback that lists what is sent and what is expected."""

from time import perf_counter

from transports import LoopbackWorld
from transports.simulated import LoopbackTransport, Rules


class Listener(LoopbackTransport):
    """Notes the label of each message that is sent, and of each receive that is made."""

    def __init__(self, rank, world_size):
        super().__init__(rank, Rules(world_size, "mesh", "directional", None, perf_counter, None), [], [])
        self.sent, self.expected = [], []

    def send(self, array, to, label=""):
        self.sent.append(label)
        return super().send(array, to, label)

    def receive(self, shape, dtype, source, label=""):
        self.expected.append(label)
        return super().receive(shape, dtype, source, label)


class Listening(LoopbackWorld):
    """A world of listeners."""

    def __init__(self, world_size):
        super().__init__(world_size)
        self._transports = [Listener(rank, world_size) for rank in range(world_size)]

    @property
    def sent(self):
        """What all ranks sent, by rank."""
        return [transport.sent for transport in self._transports]

    @property
    def expected(self):
        """What all ranks made receives for, by rank."""
        return [transport.expected for transport in self._transports]
