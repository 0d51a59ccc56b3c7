"""A training run that is killed when a point of writing a checkpoint is come to for the COUNTth time.

    python tests/killed_writing.py POINT COUNT FLAGS...

It ends by SIGKILL, so nothing is flushed, closed or cleaned up.
"""

import os
import signal
import sys

import mlx.core as mx

from pptrain.config import parse
from pptrain.job import execute

mx.disable_compile()
point, count, flags = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
seen: list[str] = []


def at(here: str) -> None:
    seen.append(here)
    if seen.count(point) == count:
        os.kill(os.getpid(), signal.SIGKILL)


execute(parse(flags), at)
