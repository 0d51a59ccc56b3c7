"""How arrays get from one rank to another: a simulated world, `mx.distributed`'s ring, and JACCL.

This package knows nothing of pipelines and imports nothing of `pptrain`.
"""

from __future__ import annotations

import os
from typing import Literal

from transports.base import Lanes, Receive, Sum, Task, Transport, Wait, World
from transports.errors import (
    BoundaryMismatch,
    DeadlockError,
    PeerLost,
    TransportClosed,
    TransportError,
    TransportSetupError,
    TransportTimeout,
    UndeliveredMessage,
)
from transports.loopback import LoopbackWorld

__all__ = [
    "BoundaryMismatch",
    "DeadlockError",
    "Lanes",
    "LoopbackWorld",
    "PeerLost",
    "Receive",
    "Sum",
    "Task",
    "Transport",
    "TransportClosed",
    "TransportError",
    "TransportSetupError",
    "TransportTimeout",
    "UndeliveredMessage",
    "Wait",
    "World",
    "detect",
    "open_world",
]


def detect() -> Literal["ring", "jaccl"] | None:
    """The backend that `mlx.launch` set up for this process, if any."""
    if "MLX_JACCL_COORDINATOR" in os.environ:
        return "jaccl"
    return "ring" if "MLX_HOSTFILE" in os.environ else None


def open_world(name: str) -> World:
    """Join the ranks of this run over `ring` or `jaccl`.

    Raises:
        TransportSetupError: If it cannot be started here; the message says what to do.
    """
    match name:
        case "ring":
            from transports.ring import RingWorld

            return RingWorld()
        case "jaccl":
            from transports.jaccl import JacclWorld

            return JacclWorld()
        case _:
            raise TransportSetupError(f"Unknown transport {name!r}. Expected ring or jaccl.")
