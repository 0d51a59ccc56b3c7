"""MLX's compiling, turned on for a while: what a function computes is built and nothing of it evaluated."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import mlx.core as mx

EVALUATED = "Attempting to eval an array during function transformations"
"""MLX's words where a function that it compiles looks at a number."""


@contextmanager
def compiling() -> Generator[None]:
    """Let `mx.compile` compile, where it was turned off, too."""
    was_on = _is_on()
    mx.enable_compile()
    try:
        yield
    finally:
        if not was_on:
            mx.disable_compile()


def _is_on() -> bool:
    """Whether MLX compiles now, which it tells nobody: a function that is compiled has no number to look at."""
    try:
        mx.compile(lambda array: array + array.item())(mx.array(0))
    except ValueError:
        return True
    return False
