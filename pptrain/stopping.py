"""SIGINT and SIGTERM ask a run to stop after its step; a second one stops it at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from transports import World

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def asked_by_signals(world: World, ask: Callable[[], None]) -> Generator[None]:
    """Call `ask` at the first signal, and raise a KeyboardInterrupt at the second, while this lasts.

    Args:
        world: Told that the first signal is none of its business: a rank that is in a wait stays in it.
        ask: Makes the run stop when all ranks can.
    """
    if threading.current_thread() is not threading.main_thread():  # signals come to the main thread alone
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.default_int_handler)
        print(f"{signal.Signals(number).name}: stopping after this step; once more to stop at once.", file=sys.stderr)
        ask()

    before = {each: signal.signal(each, handle) for each in _SIGNALS}
    world.leave_signals(1)
    try:
        yield
    finally:
        world.leave_signals(0)
        for each, handler in before.items():
            signal.signal(each, handler)
