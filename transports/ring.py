"""MLX's ring: TCP between neighbours, one lane for each direction."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import cast, final

from transports.base import Lanes
from transports.distributed import TIMEOUT_SECONDS, GroupTransport, GroupWorld
from transports.errors import TransportSetupError
from transports.meeting import LIMIT_SECONDS, Address, check_free, is_address, meet, parse_address
from transports.setup import init_group, rank_among, read_json
from transports.wire import MAX_PIECE_BYTES


@final
class RingWorld(GroupWorld):
    """This process's rank of the ring that `mlx.launch --backend ring` started.

    Args:
        lanes: `single` puts everything on one stream, one communication at a time, as JACCL needs it.
        max_piece_bytes: Larger messages go in several pieces; the same on every rank.
        check_messages: Whether a header goes before each message; the same on every rank.
        timeout_seconds: How long a rank may be silent, or wait for one communication.
        start_seconds: How long the other ranks may take to start.
        environ: Where MLX_RANK and MLX_HOSTFILE are looked up.

    Raises:
        TransportSetupError: If the environment is not that of a ring, or the ring does not come about.
    """

    def __init__(
        self,
        *,
        lanes: Lanes = "directional",
        max_piece_bytes: int = MAX_PIECE_BYTES,
        check_messages: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
        start_seconds: float = LIMIT_SECONDS,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        where, entries = read_json(environ, "MLX_HOSTFILE", "ring")
        rank = rank_among(environ, len(entries), where)
        addresses = check_addresses(entries, where)
        if rank:
            check_free(addresses[rank], where)
        connections = meet(rank, len(entries), addresses[0][0], where, limit_seconds=start_seconds)
        neighbours = neighbours_of(rank, len(entries))
        transport = GroupTransport(init_group("ring"), lanes, neighbours, max_piece_bytes, check_messages)
        super().__init__(transport, connections, timeout_seconds)


def neighbours_of(rank: int, world_size: int) -> set[int]:
    """The ranks that a ring links to this one; with two ranks left and right are the same."""
    return {(rank - 1) % world_size, (rank + 1) % world_size}


def check_addresses(entries: list[object], where: str) -> list[list[Address]]:
    """Each rank has its addresses, `["10.0.0.1:5000"]`, and no two the same one; returns them."""
    owners: dict[str, int] = {}
    for rank, entry in enumerate(entries):
        if not isinstance(entry, list) or not entry:
            raise TransportSetupError(
                f'{where}: entry {rank} is {entry!r}, but a list as ["10.0.0.1:5000"] was expected.'
            )
        for address in cast(list[object], entry):
            _check_address(address, f"{where}: entry {rank}")
            if str(address) in owners:
                raise TransportSetupError(_shared(str(address), owners[str(address)], rank, where))
            owners[str(address)] = rank
    return [[parse_address(text) for text, owner in owners.items() if owner == rank] for rank in range(len(entries))]


def _shared(address: str, owner: int, rank: int, where: str) -> str:
    if owner == rank:
        return f"{where}: entry {rank} has the address {address} twice. Each connection needs a port of its own."
    return f"{where}: entries {owner} and {rank} both have the address {address}. Each needs one of its own."


def _check_address(address: object, where: str) -> None:
    if not isinstance(address, str) or not is_address(address):
        raise TransportSetupError(f"{where} has the address {address!r}, but one as '10.0.0.1:5000' was expected.")
