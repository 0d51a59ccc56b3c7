"""What goes before each message in checked mode: enough to see that it is the message that its receiver waits for.

A tagless link hands over bytes. In checked mode both ends count the messages of each directed link, and a message comes
with a header of `HEADER_BYTES` bytes that says which one it is, what it is called, its shape, dtype and checksum.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from transports.buffers import Bytes, array_from

_MAGIC = b"ppt1"
_LABEL_BYTES = 64
_MAX_DIMENSIONS = 8
_FORMAT = f"<4sIqB{_MAX_DIMENSIONS}q16s{_LABEL_BYTES}s"

HEADER_BYTES = struct.calcsize(_FORMAT)


@dataclass(frozen=True, slots=True)
class Header:
    """Which message of its link this is, and what it looks like."""

    sequence: int
    """Its place on its directed link, from 0."""
    label: str
    """What it is called at its end: `0F2`; the first 64 bytes count."""
    shape: tuple[int, ...]
    dtype: str
    """`float32`."""
    checksum: int
    """CRC-32 of its bytes."""

    @classmethod
    def of(cls, sequence: int, label: str, shape: Sequence[int], dtype: mx.Dtype, data: Bytes) -> Header:
        """The header of a message with these bytes.

        Raises:
            ValueError: If the message has more than 8 dimensions.
        """
        if len(shape) > _MAX_DIMENSIONS:
            raise ValueError(f"A checked message has at most {_MAX_DIMENSIONS} dimensions, not {tuple(shape)}.")
        return cls(sequence, _cut(label), tuple(shape), dtype_name(dtype), zlib.crc32(data.data))

    def encode(self) -> mx.array:
        """The header as uint8 `[HEADER_BYTES]`, evaluated."""
        shape = [*self.shape, *[0] * (_MAX_DIMENSIONS - len(self.shape))]
        packed = struct.pack(
            *(_FORMAT, _MAGIC, self.checksum, self.sequence, len(self.shape), *shape),
            *(self.dtype.encode(), self.label.encode()),
        )
        return array_from(np.frombuffer(packed, np.uint8), (HEADER_BYTES,), mx.uint8)

    @classmethod
    def decode(cls, data: Bytes) -> Header | None:
        """The header that these bytes are, or None if they are none: the link is out of step."""
        magic, checksum, sequence, dimensions, *rest = struct.unpack(_FORMAT, data.tobytes())
        if magic != _MAGIC or dimensions > _MAX_DIMENSIONS:
            return None
        *shape, dtype, label = rest
        text = label.rstrip(b"\0").decode(errors="replace")
        return cls(sequence, text, tuple(shape[:dimensions]), dtype.rstrip(b"\0").decode(errors="replace"), checksum)

    def __str__(self) -> str:
        return f"message {self.sequence}, {self.label or 'without label'}, {self.dtype} {self.shape}"


def mismatch(found: Header | None, sequence: int, label: str, shape: Sequence[int], dtype: mx.Dtype) -> str | None:
    """Both sides' view in words if a header is not that of the message which its receiver waits for."""
    expected = Header(sequence, _cut(label), tuple(shape), dtype_name(dtype), 0)
    if found is None:
        return f"bytes came that are no header, where {expected} was expected"
    same = (found.sequence, found.label, found.shape, found.dtype) == (
        *(expected.sequence, expected.label, expected.shape, expected.dtype),
    )
    return None if same else f"the sender says {found}, but the receiver expects {expected}"


def damage(found: Header, data: Bytes) -> str | None:
    """What is wrong with a message's bytes, if they are not those that were sent."""
    checksum = zlib.crc32(data.data)
    if checksum == found.checksum:
        return None
    return f"{found} was sent with the checksum {found.checksum:08x} and came with {checksum:08x}: bytes were damaged"


def dtype_name(dtype: mx.Dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("mlx.core.")


def _cut(label: str) -> str:
    return label.encode()[:_LABEL_BYTES].decode(errors="ignore")
