"""Which errors a fault may lead to."""

from __future__ import annotations

from collections.abc import Sequence

from transports import BoundaryMismatch, DamagedMessage, RankDied, TransportError, TransportTimeout, UndeliveredMessage
from transports.faults import Damages, Dies, Fault, Stalls


def may_cause(error: TransportError, faults: Sequence[Fault]) -> bool:
    """Whether one of the faults leads to such an error."""
    hows = {fault.how for fault in faults if isinstance(fault, Damages)}
    match error:
        case RankDied():
            return any(f"[rank {fault.rank}] {fault}" in str(error) for fault in faults if isinstance(fault, Dies))
        case TransportTimeout():
            return any(isinstance(fault, Stalls) for fault in faults)
        case DamagedMessage():
            return bool(hows & {"cut", "flip"})
        case BoundaryMismatch():
            return bool(hows & {"double", "shape"})
        case UndeliveredMessage():
            return "double" in hows
        case _:
            return False
