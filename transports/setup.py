"""The environment that `mx.launch` gives a rank, checked before MLX reads it.

MLX takes `MLX_RANK=abc` for 0 and waits half a minute for peers that cannot come; here each mistake is named at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx

from transports.errors import TransportSetupError

START = "Start every rank with `mlx.launch --backend {backend} --hostfile hosts.json ...`"


def read_json(environ: Mapping[str, str], variable: str, backend: str) -> tuple[str, list[object]]:
    """The list in the JSON file that a variable names, and how to call that file in a message."""
    path = environ.get(variable)
    if not path:
        raise TransportSetupError(f"{variable} is not set, so there is no {backend}. {START.format(backend=backend)}.")
    where = f"{path} ({variable})"
    try:
        content: object = json.loads(Path(path).read_text())
    except OSError as error:
        raise TransportSetupError(f"Cannot read {where}: {error.strerror}. {START.format(backend=backend)}.") from error
    except ValueError as error:
        raise TransportSetupError(
            f"{where} is not JSON: {error}. `mlx.launch` writes an empty one for a single host: give it two or more."
        ) from error
    if not isinstance(content, list):
        raise TransportSetupError(
            f"{where} holds a {type(content).__name__}, but MLX reads a list with an entry for each rank. "
            f"A host file for `mlx.launch --hostfile` is another thing. {START.format(backend=backend)}."
        )
    return where, cast(list[object], content)


def rank_among(environ: Mapping[str, str], world_size: int, where: str) -> int:
    """The rank in MLX_RANK, which has to be one of those that the file has entries for."""
    text = environ.get("MLX_RANK", "")
    if world_size < 2:
        raise TransportSetupError(f"{where} lists {world_size} of the ranks, but a group needs two ranks or more.")
    if not text.isdecimal() or int(text) >= world_size:
        raise TransportSetupError(
            f"MLX_RANK is {text!r}, but {where} has {world_size} entries: it must be from 0 to {world_size - 1}."
        )
    return int(text)


def check_available(backend: str) -> None:
    """Whether this machine's MLX has a backend."""
    if not mx.distributed.is_available(backend):
        needs = (
            " JACCL needs macOS 26.2 or newer, Thunderbolt 5, and `rdma_ctl enable` in Recovery."
            if (backend == "jaccl")
            else ""
        )
        raise TransportSetupError(
            f"MLX has no {backend} backend on this machine.{needs} The ring works everywhere: --transport ring."
        )


def init_group(backend: str) -> mx.distributed.Group:
    """Join the group; every rank is there already, see `meeting`."""
    check_available(backend)
    try:
        return mx.distributed.init(strict=True, backend=backend)
    except RuntimeError as error:
        raise TransportSetupError(
            f"Cannot start {backend}: {error}. Do all ranks run, and are their addresses free and reachable?"
        ) from error
