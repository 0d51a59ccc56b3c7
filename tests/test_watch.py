"""What a rank's watch does before the rank acts on a failure."""

from __future__ import annotations

import socket
import threading

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


def started(connection: socket.socket, rank: int) -> Watch:
    """A watch that leaves signals alone, as it does outside the main thread."""
    watch = Watch(0, 3, 60.0, lambda happened, waited_for: happened)
    thread = threading.Thread(target=watch.start, args=([(rank, connection)],))
    thread.start()
    thread.join()
    return watch


def test_a_rank_learns_of_a_failure_only_when_the_others_have_been_told() -> None:
    """It ends by it, and whoever has not been told would take it for the first that failed."""
    ours, theirs = socket.socketpair()
    with SlowToTell(ours.detach()) as connection, theirs:
        watch, found = started(connection, 1), list[Cause | None]()
        theirs.shutdown(socket.SHUT_WR)
        assert connection.tells.wait(20)
        asks = threading.Thread(target=lambda: found.append(watch.cause(0)))
        asks.start()
        asks.join(0.3)
        assert found == []
        connection.may_tell.set()
        asks.join(20)
        assert found == [Cause(1, "lost")]
        watch.close()
