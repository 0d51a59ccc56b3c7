"""MLX's JACCL: RDMA over Thunderbolt 5, always a single lane.

Its completion queues and buffers are shared by all operations, so two at once would take each other's completions.

Whether a message gets lost whose receiver has posted no receive is not known, but the queue pairs are of the unreliable
kind. What is done about it: all ranks begin together after a barrier; every pair of a send and its receive stands in
one sequence that all ranks follow, so the receiver comes to a receive with nothing else under way; and in checked mode
what came is compared. What is not done is to post receives before they are waited for. MLX posts a receive and then
polls until the message is there, in one call that holds the lane's stream. `mx.async_eval` would let a receive begin as
soon as the communication before it is over, while its rank computes. But its sender may be further ahead than that, so
the gap would be smaller and not closed; MLX's own collectives leave the same gap; and the polling takes a core.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from typing import cast, final

from transports.distributed import TIMEOUT_SECONDS, GroupTransport, GroupWorld
from transports.errors import TransportSetupError
from transports.meeting import LIMIT_SECONDS, Address, is_address, meet, parse_address
from transports.ring import neighbours_of
from transports.setup import START, check_available, init_group, rank_among, read_json
from transports.wire import MAX_PIECE_BYTES

logger = logging.getLogger(__name__)

MAX_PEERS = 8
"""A device has 10 queue pairs."""


@final
class JacclWorld(GroupWorld):
    """This process's rank of the mesh, or ring, that `mlx.launch --backend jaccl` (or `jaccl-ring`) started.

    Args:
        max_piece_bytes: Larger messages go in several pieces; the same on every rank.
        check_messages: Whether a header goes before each message; the same on every rank.
        timeout_seconds: How long a rank may be silent, or wait for one communication.
        start_seconds: How long the other ranks may take to start.
        environ: Where MLX_RANK, MLX_IBV_DEVICES, MLX_JACCL_COORDINATOR and MLX_JACCL_RING are looked up.

    Raises:
        TransportSetupError: If the environment is not that of JACCL, or the group does not come about.
    """

    def __init__(
        self,
        *,
        max_piece_bytes: int = MAX_PIECE_BYTES,
        check_messages: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
        start_seconds: float = LIMIT_SECONDS,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        where, devices = read_json(environ, "MLX_IBV_DEVICES", "jaccl")
        rank = rank_among(environ, len(devices), where)
        check_devices(devices, environ, where)
        peers = peers_of(rank, len(devices), environ)
        coordinator = _check_coordinator(environ)
        if environ.get("MLX_METAL_FAST_SYNCH", "0") not in ("", "0"):
            logger.warning("MLX_METAL_FAST_SYNCH is set: with it deadlocks were reported. Unset it.")
        check_available("jaccl")
        connections = meet(
            rank, len(devices), coordinator, "MLX_JACCL_COORDINATOR", frame_class(), limit_seconds=start_seconds
        )
        transport = GroupTransport(init_group("jaccl"), "single", peers, max_piece_bytes, check_messages)
        super().__init__(transport, connections, timeout_seconds)
        # Whoever sends before its peer has posted a receive may lose the message: begin together.
        transport.wait(transport.barrier())


def peers_of(rank: int, world_size: int, environ: Mapping[str, str]) -> set[int]:
    """The ranks that this one has a link to: all others of a mesh, the neighbours of a ring."""
    if environ.get("MLX_JACCL_RING", "0") not in ("", "0"):
        return neighbours_of(rank, world_size)
    return set(range(world_size)) - {rank}


def check_devices(devices: list[object], environ: Mapping[str, str], where: str) -> None:
    """Each rank's row names a device for each of its peers: `[null, "rdma_en5"]` for rank 0 of two.

    Every rank looks at all rows: it would wait in vain for one that has a wrong one.
    """
    for rank, row in enumerate(devices):
        peers = peers_of(rank, len(devices), environ)
        if len(peers) > MAX_PEERS:
            raise TransportSetupError(
                f"{where}: rank {rank} of {len(devices)} has {len(peers)} peers, but JACCL links to {MAX_PEERS} at "
                "most. Use fewer ranks, or a ring: --backend jaccl-ring."
            )
        if not isinstance(row, list) or len(cast(list[object], row)) != len(devices):
            raise TransportSetupError(
                f"{where}: entry {rank} is {row!r}, but a list of {len(devices)} devices was expected."
            )
        if missing := [peer for peer in sorted(peers) if not cast(list[object], row)[peer]]:
            raise TransportSetupError(f"{where}: entry {rank} is {row!r}, which names no device to rank {missing[0]}.")


def frame_class(macos: str | None = None) -> str:
    """RDMA frames have another size from macOS 26.3 on, so both ends must be on the same side of it.

    Args:
        macos: A version, as `26.2.1`; that of this machine if left out.
    """
    version = [int(part) for part in (macos or platform.mac_ver()[0]).split(".") if part.isdecimal()]
    return "macOS 26.3 or newer" if version >= [26, 3] else "before macOS 26.3"


def _check_coordinator(environ: Mapping[str, str]) -> Address:
    coordinator = environ.get("MLX_JACCL_COORDINATOR", "")
    if not is_address(coordinator):
        raise TransportSetupError(
            f"MLX_JACCL_COORDINATOR is {coordinator!r}, but the address of rank 0 was expected, as '10.0.0.1:5000'. "
            f"{START.format(backend='jaccl')}."
        )
    return parse_address(coordinator)
