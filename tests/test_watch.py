"""What a rank's watch does before the rank acts on a failure."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from transports.watch import Cause, Watch


class SlowToTell(socket.socket):
    """Sends the cause of a failure only when it may."""

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self.tells, self.may_tell = threading.Event(), threading.Event()

    def sendall(self, data, *flags):
        if b"cause" in data:
            self.tells.set()
            self.may_tell.wait(20)
        return super().sendall(data, *flags)


def started(*connections: tuple[int, socket.socket], here: int = 0, timeout: float = 60.0) -> Watch:
    """A watch that leaves signals alone, as it does outside the main thread; connections by rank."""
    watch = Watch(here, 3, timeout, lambda happened, waited_for: happened, lambda _: None)
    thread = threading.Thread(target=watch.start, args=(connections,))
    thread.start()
    thread.join()
    return watch


@contextmanager
def watching(*connections: tuple[int, socket.socket], here: int = 0, timeout: float = 60.0) -> Generator[Watch]:
    """The same, until its thread has ended: it may not look at a connection that the test has closed."""
    before = threading.enumerate()
    watch = started(*connections, here=here, timeout=timeout)
    [thread] = [each for each in threading.enumerate() if each not in before]
    yield watch
    watch.close()
    thread.join()


def test_a_rank_learns_of_a_failure_only_when_the_others_have_been_told() -> None:
    """It ends by it, and whoever has not been told would take it for the first that failed."""
    ours, theirs = socket.socketpair()
    with SlowToTell(ours.detach()) as connection, theirs, watching((1, connection)) as watch:
        found = list[Cause | None]()
        theirs.shutdown(socket.SHUT_WR)
        assert connection.tells.wait(20)
        asks = threading.Thread(target=lambda: found.append(watch.cause(0)))
        asks.start()
        asks.join(0.3)
        assert found == []
        connection.may_tell.set()
        asks.join(20)
        assert found == [Cause(1, "lost")]


def test_a_wait_ends_in_time_though_the_hub_has_ended() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, watching((0, ours), here=1, timeout=0.4) as watch:
        theirs.sendall(b'{"bye": true}\n')
        with watch.waiting("1B0 from rank 2"):
            cause = watch.cause(5.0)
    assert cause is not None
    assert (cause.rank, cause.kind) == (1, "waited")
    assert "1B0 from rank 2" in cause.text


def test_a_link_that_broke_while_the_hub_is_silent_is_the_hubs_doing() -> None:
    """Another rank has waited longer, and ended by it; the hub can tell nobody."""
    ours, theirs = socket.socketpair()
    with ours, theirs, watching((0, ours), here=1, timeout=4.0) as watch:
        time.sleep(1.6)
        cause = watch.cause(0.3)
    assert cause is not None
    assert (cause.rank, cause.kind) == (0, "silent")


def test_who_is_silent_is_to_blame_for_another_ranks_wait_before_his_own_time_is_over() -> None:
    """Rank 1 has waited for rank 2 from long before that one fell silent."""
    ours, first = socket.socketpair()
    ours2, second = socket.socketpair()
    with ours, ours2, first, second, watching((1, ours), (2, ours2), timeout=8.0) as watch:
        time.sleep(3.5)  # three beats and a half
        first.sendall(b'{"waited": "8.0 s for 0F1 from rank 2"}\n')
        cause = watch.cause(4.0)
    assert cause is not None
    assert (cause.rank, cause.kind) == (2, "silent")


def test_a_timeout_beyond_what_a_clock_counts_is_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, watching((0, ours), here=1, timeout=1e12) as watch:
        assert watch.cause(0.1) is None
        theirs.settimeout(20)
        assert b"waits_for" in theirs.recv(100)
