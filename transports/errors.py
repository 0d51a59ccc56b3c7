"""What can go wrong on the wire, told apart by whose fault it is.

`TransportClosed` and `TransportSetupError` are ours or the user's; `PeerLost` and `TransportTimeout` are the other
side's; `BoundaryMismatch`, `UndeliveredMessage` and `DeadlockError` are a disagreement between both; `DamagedMessage`
is the wire's.
"""

import os
import re
from collections.abc import Mapping

REPORT_LINE = re.compile(r"\[rank (\d+), exit code (\d+)\] (.*)")
"""A line of a report as `report_of` makes it where a launcher mixes what all ranks say."""


def report_of(error: Exception, exit_code: int, environ: Mapping[str, str] = os.environ) -> str:
    """What a process that ends by an error says last; under a launcher each line names the rank and its exit code."""
    rank = environ.get("MLX_RANK")
    lines = f"{type(error).__name__}: {error}".splitlines()
    return "\n".join(lines if rank is None else [f"[rank {rank}, exit code {exit_code}] {line}" for line in lines])


class TransportError(RuntimeError):
    """Any failure of a transport."""

    exit_code = 1
    """What a process that ends by this error exits with."""


class TransportSetupError(TransportError):
    """The transport cannot be started here: environment, host file or machine."""

    exit_code = 2


class TransportClosed(TransportError):
    """This end was used after it was closed, or after its first error."""


class PeerLost(TransportError):
    """Another rank has ended."""

    exit_code = 3


class RankDied(PeerLost):
    """A rank of a simulated world has died of a fault that was asked for; the others see that they lost a peer."""


class TransportTimeout(TransportError):
    """Another rank is there but said nothing in time."""

    exit_code = 4


class Interrupted(TransportError):
    """This rank was interrupted while it was blocked in a wait."""

    exit_code = 130


class BoundaryMismatch(TransportError):
    """A message has another shape or dtype than its receiver expects."""


class DamagedMessage(TransportError):
    """A message came with other bytes than it was sent with."""


class UndeliveredMessage(TransportError):
    """A message was sent that its receiver did not take, before a collective or before the end."""


class DeadlockError(TransportError):
    """No rank can go on."""
