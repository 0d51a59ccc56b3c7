"""All ranks meet before MLX starts a group: its own wait for a peer is long, silent, and cannot be interrupted.

The meeting is held at an address of rank 0 that every rank knows, which MLX uses only afterwards. Each rank leaves it
with the connection that its `Watch` needs: rank 0 with one to every other rank, the others with one to rank 0.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterable
from typing import Any

from transports.errors import TransportSetupError

Address = tuple[str, int]
Connections = list[tuple[int, socket.socket]]
"""The rank at the other end, and the connection to it."""

LIMIT_SECONDS = 60.0
"""How long the last rank may take to start."""


def is_address(text: str) -> bool:
    """Whether it is a host and a port, as `10.0.0.1:5000`."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


def parse_address(text: str) -> Address:
    """`10.0.0.1:5000` as host and port."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def check_free(addresses: Iterable[Address], where: str) -> None:
    """Whether MLX will be able to listen at this machine's own addresses.

    Raises:
        TransportSetupError: Naming the address that is in use, or is not this machine's.
    """
    for address in addresses:
        _listen(address, where).close()


def meet(
    rank: int, world_size: int, address: Address, where: str, system: str = "", limit_seconds: float = LIMIT_SECONDS
) -> Connections:
    """Wait until all ranks are there.

    Args:
        rank: This rank.
        world_size: How many are expected.
        address: Of rank 0.
        where: The file that names it, for messages.
        system: What has to be the same on every rank for the backend to work; empty for nothing.
        limit_seconds: How long to wait.

    Raises:
        TransportSetupError: Naming who has not come, or came with another world size or system.
    """
    deadline = time.monotonic() + limit_seconds
    if rank == 0:
        return _receive_all(world_size, address, where, system, deadline)
    return [(0, _join(rank, world_size, address, where, system, deadline))]


def _listen(address: Address, where: str) -> socket.socket:
    try:
        return socket.create_server(address)
    except OSError as error:
        raise TransportSetupError(
            f"Cannot listen at {address[0]}:{address[1]}, which {where} gives this rank: {error.strerror}. Expected an "
            "address of this machine with a free port. End what uses it, or start with another port."
        ) from error


def _receive_all(world_size: int, address: Address, where: str, system: str, deadline: float) -> Connections:
    came = dict[int, socket.socket]()
    with _listen(address, where) as door, socket.create_server((address[0], 0)) as hall:
        welcome = {"port": hall.getsockname()[1], "token": secrets.token_hex(8)}
        welcome |= {"world_size": world_size, "system": system}
        while len(came) < world_size - 1:
            guest = _next_guest(door, deadline)
            if guest is None:
                raise _not_all_came(came, world_size, address, where)
            with guest:
                _say(guest, welcome)
                if not _hear(guest):  # refused, and said why at its own end
                    continue
            entered = _next_guest(hall, deadline)
            hello = _hear(entered) if entered else {}
            if entered and hello.get("token") == welcome["token"]:
                came[int(hello["rank"])] = entered
    # MLX listens at the same address next: nobody may begin to connect before this door is closed.
    for guest in came.values():
        _say(guest, {"begin": True})
    return sorted(came.items())


def _not_all_came(came: dict[int, socket.socket], world_size: int, address: Address, where: str) -> TransportSetupError:
    for guest in came.values():
        guest.close()
    missing = [str(rank) for rank in range(1, world_size) if rank not in came]
    return TransportSetupError(
        f"Rank {', '.join(missing)} of {world_size} has not come to rank 0 at {address[0]}:{address[1]}. "
        f"Expected every rank of {where} in time. See whether its process runs, and reaches this address."
    )


def _join(rank: int, world_size: int, address: Address, where: str, system: str, deadline: float) -> socket.socket:
    with _reach(address, where, deadline) as door:
        welcome = _hear(door)
        for name, mine in (("world_size", world_size), ("system", system)):
            if welcome.get(name) != mine:
                raise TransportSetupError(
                    f"Rank {rank} has {name} {mine!r}, but rank 0 at {address[0]}:{address[1]} has "
                    f"{welcome.get(name)!r}. Expected the same on every rank. Is {where} the same file, and are all "
                    "systems equally new?"
                )
        _say(door, {"rank": rank})
        hall = socket.create_connection((address[0], welcome["port"]), timeout=30)
        _say(hall, {"rank": rank, "token": welcome["token"]})
    hall.settimeout(max(0.1, deadline - time.monotonic()))
    if not _hear(hall):
        raise TransportSetupError(f"Rank 0 at {address[0]}:{address[1]} did not begin: see what it said last.")
    return hall


def _reach(address: Address, where: str, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() > deadline:
                raise TransportSetupError(
                    f"Rank 0 cannot be reached at {address[0]}:{address[1]}, its address in {where}: "
                    f"{error.strerror or error}. See whether its process runs, and reach it with `ping`."
                ) from error
            time.sleep(0.05)


def _next_guest(door: socket.socket, deadline: float) -> socket.socket | None:
    door.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        guest = door.accept()[0]
    except TimeoutError:
        return None
    guest.settimeout(30)
    return guest


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _hear(connection: socket.socket) -> dict[str, Any]:
    """The next line; nothing if the other end has gone, or is nobody that we know."""
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < 1000:
            byte = connection.recv(1)
            if not byte:
                return {}
            line += byte
        return json.loads(line)
    except (OSError, ValueError):
        return {}
