"""Who is still there: a thread beside each rank of a group, with a TCP connection of its own.

A communication of MLX that waits cannot be interrupted, and cannot tell a peer that has ended from one that is silent.
So each rank says a few times in every timeout that it is there, and what it waits for; the first failure is told to
all, who end by it::

    rank 1 ── beats; why it failed ──> rank 0, the hub ── beats; whose failure came first ──> every rank

A failure is known by its first cause, never by the neighbour that ended because of it. A rank that is told of one
raises an error at its next use of the transport; if it is blocked in MLX, the thread prints its report and ends the
process.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any, Literal

from transports.errors import Interrupted, PeerLost, TransportError, TransportTimeout, report_of
from transports.meeting import Connections

Kind = Literal["lost", "silent", "failed", "waited", "interrupted"]

GRACE_SECONDS = 1.0
"""How long a rank that was told of a failure may stay in a wait, which the same failure often ends."""

_BEATS = 8
"""Beats in one timeout."""

_LONGEST_SECONDS = 1e6
"""A socket takes no timeout that is beyond what a clock counts."""

_AWAY = "is there and waited for nobody: it computes, or does something else"


@dataclass(frozen=True, slots=True)
class Cause:
    """The first failure of a run."""

    rank: int
    kind: Kind
    text: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "lost":
                return f"rank {self.rank} was lost first: its process has ended without a word"
            case "silent":
                return f"rank {self.rank} is silent: its process is there, but has said nothing for {self.text} s"
            case "failed":
                return f"rank {self.rank} failed first: {self.text}"
            case "waited":
                return f"rank {self.rank} waited too long: {self.text}"
            case "interrupted":
                return f"rank {self.rank} was interrupted"

    @property
    def error(self) -> type[TransportError]:
        """The class of the error that every other rank ends with."""
        return TransportTimeout if self.kind in ("silent", "waited") else PeerLost


@dataclass(slots=True)
class _Peer:
    """One connection, and when something last came over it."""

    socket: socket.socket
    rank: int
    heard_at: float
    is_gone: bool = False
    unread: bytes = b""
    waits_for: str = ""
    """What it said last that it waits for; empty while it computes."""


Report = Callable[[str, str], str]
"""From what happened, and what was waited for or nothing, to the whole report: where this rank stood."""


def end_process(error: TransportError) -> None:
    """Print a report and end this process at once, whatever MLX waits for."""
    sys.stdout.flush()
    print(report_of(error, error.exit_code), file=sys.stderr, flush=True)
    os._exit(error.exit_code)


class Watch:
    """This rank's thread.

    Args:
        rank: This rank.
        world_size: How many there are.
        timeout_seconds: How long a rank may be silent, or wait for one communication.
        report: Makes an error's text.
        end: What is done when this rank is blocked and has to end.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        report: Report,
        end: Callable[[TransportError], None] = end_process,
    ) -> None:
        self.rank, self.world_size, self.timeout_seconds = rank, world_size, timeout_seconds
        self._report, self._end = report, end
        self._interval = min(2.0, timeout_seconds / _BEATS)
        self._peers = list[_Peer]()
        self._lock = threading.RLock()
        self._known = threading.Event()
        self._cause: Cause | None = None
        self._known_at = 0.0
        self._has_asked = False
        self._is_noticed = False
        self._wait: tuple[str, float] | None = None  # one thing, since the thread reads it at any time
        self._is_closed = False
        self._signals: socket.socket | None = None
        self._signals_left = 0

    # -- called by the rank itself -------------------------------------------------------------------------------------

    def start(self, connections: Connections) -> None:
        """Begin to watch; every rank calls this at about the same time."""
        for rank, connection in connections:
            connection.settimeout(min(self.timeout_seconds, _LONGEST_SECONDS))
            self._peers.append(_Peer(connection, rank, monotonic()))
        self._catch_signals()
        atexit.register(self.close)
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """Count the seconds of one wait."""
        self._wait = what, monotonic()
        try:
            yield
        finally:
            self._wait = None

    @property
    def present_wait(self) -> tuple[str, float]:
        """What is waited for, and for how many seconds; empty while nothing is."""
        wait = self._wait
        return ("", 0.0) if wait is None else (wait[0], monotonic() - wait[1])

    def cause(self, patience_seconds: float) -> Cause | None:
        """The first failure, if one is known, or becomes known in the time given; the caller then acts on it."""
        if not self._known.wait(patience_seconds) and patience_seconds and (silent := self._silent_rank()):
            self._learn(silent)  # Only a hub that says nothing leaves this rank without word of what others ended by.
        with self._lock:  # A rank that acts on it ends, so first the others have to be told.
            self._is_noticed = self._cause is not None
            return self._cause

    def tell(self, kind: Kind, text: str = "") -> None:
        """Tell the others that this rank ends, and why; what another rank did first stays the cause."""
        self._is_noticed = True
        self._learn(Cause(self.rank, kind, text[:2000]))

    def leave_signals(self, count: int) -> None:
        """Take no notice of the next signals that ask for an end: the program does what they ask by itself."""
        self._signals_left = count

    def close(self) -> None:
        """Say good-bye and watch no more."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._say({"bye": True})

    # -- what it says --------------------------------------------------------------------------------------------------

    def _say(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            for peer in self._peers:
                # Whoever cannot be told any more is noticed where it is listened to.
                with suppress(OSError):
                    peer.socket.sendall(line)

    def _catch_signals(self) -> None:
        """Let the thread see Ctrl-C, which Python's own handler does not while MLX blocks the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._signals, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        beat_at = 0.0
        while not self._is_closed:
            self._listen_for(self._interval / 2)
            now = monotonic()
            if now >= beat_at:
                self._say({"waits_for": self.present_wait[0]})
                beat_at = now + self._interval
            self._look_for_failures(now)
            if self._cause is not None and self._is_blocked(now):
                self._end(self.error_of(self._cause))
                return

    def _is_blocked(self, now: float) -> bool:
        """Whether this rank has been in a wait for a while although a failure is known."""
        wait = self._wait
        return not self._is_noticed and wait is not None and now - max(wait[1], self._known_at) > GRACE_SECONDS

    def error_of(self, cause: Cause, waited_for: str = "") -> TransportError:
        """What this rank ends with, and what it waited for, if that is not the present wait."""
        if cause.rank == self.rank and cause.kind == "interrupted":
            return Interrupted(self._report("interrupted", waited_for))
        return cause.error(self._report(str(cause), waited_for))

    def _listen_for(self, seconds: float) -> None:
        sources = [peer.socket for peer in self._peers if not peer.is_gone]
        sources += [self._signals] if self._signals else []
        ready: list[socket.socket] = select.select(sources, [], [], seconds)[0] if sources else []
        for each in ready:
            if each is self._signals:
                self._hear_signals(each)
            else:
                self._hear(next(peer for peer in self._peers if peer.socket is each))

    def _hear_signals(self, signals: socket.socket) -> None:
        # A SIGTERM is heard only where the program has a handler for it: by itself it ends a process at once.
        heard = sum(number in (signal.SIGINT, signal.SIGTERM) for number in signals.recv(64))
        left, self._signals_left = self._signals_left, max(0, self._signals_left - heard)
        if heard > left:
            self._learn(Cause(self.rank, "interrupted"))

    def _hear(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            peer.is_gone = True
            self._learn(Cause(peer.rank, "lost"))
            return
        peer.heard_at = monotonic()
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        for line in lines:
            if not peer.is_gone:  # what it had still to say when it said good-bye is of no account
                self._understand(peer, json.loads(line))

    def _understand(self, peer: _Peer, message: dict[str, Any]) -> None:
        if "bye" in message:
            peer.is_gone = True
        elif "cause" in message:
            self._learn(Cause(**message["cause"]))
        elif "waited" in message:
            self._learn(self._why_waited(peer.rank, message["waited"]))
        elif "waits_for" in message:
            peer.waits_for = message["waits_for"]

    def _look_for_failures(self, now: float) -> None:
        for peer in self._peers:
            if now - peer.heard_at > self.timeout_seconds and not peer.is_gone:
                self._learn(Cause(peer.rank, "silent", f"{now - peer.heard_at:.1f}"))
        what, seconds = self.present_wait
        if seconds > self.timeout_seconds:
            self._has_waited_too_long(f"{seconds:.1f} s for {what}")

    def _has_waited_too_long(self, text: str) -> None:
        """Find out for whom; only the hub hears everybody, and nobody does when it has ended."""
        if self.rank == 0 or self._silent_rank() or all(peer.is_gone for peer in self._peers):
            self._learn(self._why_waited(self.rank, text))
        elif not self._has_asked:
            self._has_asked = True
            self._say({"waited": text})

    def _why_waited(self, rank: int, text: str) -> Cause:
        """Somebody who is silent; else the wait itself, with what the other ranks did meanwhile."""
        if silent := self._silent_rank():
            return silent
        waits = {peer.rank: peer.waits_for for peer in self._peers if not peer.is_gone}
        waits[self.rank] = self.present_wait[0]
        waits.pop(rank)
        did = [f"rank {other} " + (f"waited for {waits[other]}" if waits[other] else _AWAY) for other in sorted(waits)]
        return Cause(rank, "waited", "; ".join([text, *did]))

    def _silent_rank(self) -> Cause | None:
        """Whose silence explains that somebody has waited too long: the connected rank that was last heard of first."""
        talking = [peer for peer in self._peers if not peer.is_gone]
        oldest = min(talking, key=lambda peer: peer.heard_at, default=None)
        if oldest is None or monotonic() - oldest.heard_at <= 3 * self._interval:
            return None
        return Cause(oldest.rank, "silent", f"{monotonic() - oldest.heard_at:.1f}")

    def _learn(self, cause: Cause) -> None:
        """Keep the first failure, and tell it on."""
        with self._lock:
            if self._is_closed or self._cause is not None:
                return
            self._cause, self._known_at = cause, monotonic()
            self._say({"cause": asdict(cause)})
            self._known.set()
