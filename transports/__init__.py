"""How arrays get from one rank to another: a simulated world, `mx.distributed`'s ring, and JACCL.

This package knows nothing of pipelines and imports nothing of `pptrain`.
"""

import os
from collections.abc import Mapping
from typing import Literal, get_args

from transports.base import Lanes, Receive, Sum, Task, Transport, Wait, World
from transports.distributed import TIMEOUT_SECONDS
from transports.errors import (
    BoundaryMismatch,
    DamagedMessage,
    DeadlockError,
    Interrupted,
    PeerLost,
    RankDied,
    TransportClosed,
    TransportError,
    TransportSetupError,
    TransportTimeout,
    UndeliveredMessage,
    report_of,
)
from transports.jaccl import JacclWorld
from transports.loopback import LoopbackWorld
from transports.operations import BufferReceive
from transports.ring import RingWorld
from transports.setup import START

TransportName = Literal["loopback", "ring", "jaccl"]

__all__ = [
    "BoundaryMismatch",
    "BufferReceive",
    "DamagedMessage",
    "DeadlockError",
    "Interrupted",
    "JacclWorld",
    "Lanes",
    "LoopbackWorld",
    "PeerLost",
    "RankDied",
    "Receive",
    "RingWorld",
    "Sum",
    "Task",
    "Transport",
    "TransportClosed",
    "TransportError",
    "TransportName",
    "TransportSetupError",
    "TransportTimeout",
    "UndeliveredMessage",
    "Wait",
    "World",
    "detect",
    "open_world",
    "report_of",
]


def detect(environ: Mapping[str, str] = os.environ) -> Literal["ring", "jaccl"] | None:
    """Which backend `mlx.launch` started this process for; None if it was not started so.

    Raises:
        TransportSetupError: If it was started as a rank of another backend: alone, each would do the whole work.
    """
    if environ.get("MLX_IBV_DEVICES") or environ.get("MLX_JACCL_COORDINATOR"):
        return "jaccl"
    if environ.get("MLX_HOSTFILE"):
        return "ring"
    if rank := environ.get("MLX_RANK"):
        raise TransportSetupError(
            f"MLX_RANK is {rank!r}, but neither MLX_HOSTFILE (of a ring) nor MLX_IBV_DEVICES (of JACCL) is set. "
            f"{START.format(backend='ring')}, or unset MLX_RANK."
        )
    return None


def open_world(
    name: str,
    world_size: int | None = None,
    *,
    lanes: Lanes | None = None,
    seed: int = 0,
    check_messages: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> World:
    """Open the world that this name stands for.

    Args:
        name: `loopback`, `ring` or `jaccl`.
        world_size: How many ranks; a loopback needs it, a ring or JACCL must have come to the same.
        lanes: None for what the transport does by itself; JACCL has a single lane always.
        seed: Decides who goes on in a loopback.
        check_messages: Whether each message is compared with what its receiver expects; the same on every rank.
        timeout_seconds: How long a rank of a ring or of JACCL may be silent, or wait for one communication.

    Raises:
        TransportSetupError: If there is no such transport here, or not of that size.
    """
    world = _open(name, world_size, lanes, seed, check_messages, timeout_seconds)
    if world_size not in (None, world.world_size):
        raise TransportSetupError(f"{name} was started with {world.world_size} ranks, but {world_size} were asked for.")
    return world


def _open(
    name: str, world_size: int | None, lanes: Lanes | None, seed: int, check_messages: bool, timeout_seconds: float
) -> World:
    match name:
        case "loopback" if world_size is not None:
            return LoopbackWorld(world_size, lanes=lanes or "directional", seed=seed, check_messages=check_messages)
        case "loopback":
            raise TransportSetupError("A loopback runs all ranks in this process: say how many.")
        case "ring":
            return RingWorld(
                lanes=lanes or "directional", check_messages=check_messages, timeout_seconds=timeout_seconds
            )
        case "jaccl" if lanes != "directional":
            return JacclWorld(check_messages=check_messages, timeout_seconds=timeout_seconds)
        case "jaccl":
            raise TransportSetupError("JACCL has a single lane: its operations share queues and buffers.")
        case _:
            raise TransportSetupError(
                f"There is no transport {name!r}. There are: {', '.join(get_args(TransportName))}."
            )
