"""Files that are whole or not there: written beside their place, brought to the disk, and renamed into it."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

At = Callable[[str], None]
"""Told of each point of writing, by its name: whatever a test lets it do happens there, a kill for instance."""


def nothing(point: str) -> None:
    """What happens at a point of writing in every run but a test's."""


def write_whole(path: Path, write: Callable[[BinaryIO], Any], at: At = nothing) -> str:
    """Write a file such that a kill or a full disk at any moment leaves what was there before.

    Args:
        path: The file.
        write: Given the file that is open beside its place.
        at: Told of `begin`, `writing` before each piece, `written` and `renamed`.

    Returns:
        SHA-256 of what was written, as it was written: what the disk makes of it can be compared with that.

    Raises:
        OSError: If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.stem}.partial{path.suffix}")
    at("begin")
    try:
        with beside.open("wb", buffering=0) as file:
            hashing = _Hashing(file, at)
            write(cast(BinaryIO, hashing))
            _bring_to_disk(file.fileno())
        at("written")
        os.replace(beside, path)
    except Exception:
        beside.unlink(missing_ok=True)
        raise
    _bring_directory_to_disk(path.parent)
    at("renamed")
    return hashing.digest.hexdigest()


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Hashing(io.RawIOBase):
    """A file that is written from its beginning to its end, and hashed on the way."""

    def __init__(self, file: io.FileIO, at: At) -> None:
        self._file, self._at = file, at
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._at("writing")
        left = memoryview(data).cast("B")
        self.digest.update(left)
        size = len(left)
        while len(left):  # an unbuffered file may take less than it is given
            left = left[self._file.write(left) or 0 :]
        return size


def _bring_to_disk(descriptor: int) -> None:
    """On macOS a plain fsync leaves the data in the drive's own memory."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(descriptor)
        return
    try:
        fcntl.fcntl(descriptor, full)
    except OSError:  # a file system that does not know it
        os.fsync(descriptor)


def _bring_directory_to_disk(directory: Path) -> None:
    """A rename is on the disk when its directory is."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
