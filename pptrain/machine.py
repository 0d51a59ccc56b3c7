"""What this machine is, and over what it can talk to others."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from time import perf_counter

import mlx.core as mx

from transports.jaccl import frame_class

_MIN_MACOS_OF_JACCL = (26, 2)
_USABLE_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that decide what can be trained here."""

    system: str
    chip: str
    device: str
    """What MLX computes on: `gpu` or `cpu`."""
    memory_bytes: int
    wired_limit_bytes: int | None
    """How much of its memory the GPU may keep; None where there is no such limit."""
    versions: dict[str, str]
    rdma_class: str = ""
    """Which size of RDMA frames JACCL uses here; nothing where there is no JACCL."""

    @property
    def usable_bytes(self) -> float:
        """What training may use: what the GPU may keep, or three quarters of the memory where there is no limit."""
        return self.wired_limit_bytes or _USABLE_SHARE * self.memory_bytes


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to talk to other ranks; if it is not available, why, and what to do."""

    name: str
    is_available: bool
    why_not: str = ""
    what_to_do: str = ""


def look() -> Machine:
    """Ask the system and MLX."""
    info = mx.device_info()
    wired = info.get("max_recommended_working_set_size")
    return Machine(
        system=f"{_system()} ({platform.machine()})",
        chip=str(info.get("device_name", "unknown")),
        device=mx.default_device().type.name,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        wired_limit_bytes=None if wired is None else int(wired),
        rdma_class=frame_class() if platform.system() == "Darwin" else "",
        versions={"python": platform.python_version()} | {name: version(name) for name in ("mlx", "mlx-lm", "pptrain")},
    )


def backends() -> list[Backend]:
    """Every transport, and whether it can be used here."""
    is_mac = platform.system() == "Darwin"
    return [
        Backend("loopback", True),
        ring(mx.distributed.is_available("ring")),
        jaccl(
            mx.distributed.is_available("jaccl"),
            _numbers(platform.mac_ver()[0]) if is_mac else None,
            _rdma_devices() if is_mac else [],
        ),
    ]


def ring(is_built: bool) -> Backend:
    """Whether MLX can open a ring."""
    if is_built:
        return Backend("ring", True)
    return Backend("ring", False, "this MLX was built without it", "Install MLX from PyPI: pip install -U mlx.")


def jaccl(is_built: bool, macos: Sequence[int] | None, devices: Sequence[str]) -> Backend:
    """Whether RDMA over Thunderbolt can be used.

    Args:
        is_built: Whether MLX has it.
        macos: The version of macOS, as (26, 2); None on another system.
        devices: The RDMA devices that the system lists.
    """
    if macos is None:
        why, do = "it is RDMA over Thunderbolt 5, which macOS has", "Use the ring."
    elif tuple(macos) < _MIN_MACOS_OF_JACCL:
        why, do = (
            f"macOS {_dotted(macos)} is older than {_dotted(_MIN_MACOS_OF_JACCL)}",
            "Update macOS, or use the ring.",
        )
    elif not is_built:
        why, do = "this MLX was built without it", "Install MLX from PyPI: pip install -U mlx."
    elif not devices:
        why = "the system lists no RDMA device"
        do = "On a Mac with Thunderbolt 5: start into Recovery, run `rdma_ctl enable`, restart, look at `ibv_devices`."
    else:
        return Backend("jaccl", True)
    return Backend("jaccl", False, why, do)


def matrix_product_rate(dtype: mx.Dtype, least_seconds: float = 0.02) -> float:
    """Floating-point operations a second in a product of square matrices that is large enough to take a while."""
    size, seconds = 128, 0.0
    while seconds < least_seconds and size < 16384:
        size *= 2
        square = mx.ones((size, size), dtype=dtype)
        seconds = min(_seconds_of_product(square) for _ in range(3))
    return 2 * size**3 / seconds


def _seconds_of_product(square: mx.array) -> float:
    square[0, 0].item()
    began = perf_counter()
    (square @ square)[0, 0].item()
    return perf_counter() - began


def _system() -> str:
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    return f"{platform.system()} {platform.release()}"


def _rdma_devices() -> list[str]:
    """The first column of `ibv_devices`, below its two header lines; nothing where there is no such command."""
    command = shutil.which("ibv_devices")
    if command is None:
        return []
    try:
        lines = subprocess.run([command], capture_output=True, text=True, timeout=5).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.split()[0] for line in lines[2:] if line.strip()]


def _numbers(dotted: str) -> tuple[int, ...]:
    return tuple(int(part) for part in dotted.split(".") if part.isdecimal())


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
