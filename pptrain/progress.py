"""Where a run stands between two updates: with parameters and moments, all that its future depends on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

import mlx.core as mx
import numpy as np

NumpyState = tuple[str, str, int, int, float]
"""NumPy's global generator: its kind, its words as hexadecimal text, its place in them, and a Gaussian kept for later:
what `numpy.random.get_state` returns, as JSON has it."""


def numpy_state() -> NumpyState:
    """The state of NumPy's global generator, from which mlx-lm draws the order of batches."""
    kind, words, place, has_gauss, gauss = _global_state()
    return str(kind), np.asarray(words, "<u4").tobytes().hex(), int(place), int(has_gauss), float(gauss)


def set_numpy_state(state: NumpyState) -> None:
    """Make NumPy's global generator go on from a state."""
    np.random.set_state(as_numpy(state))


def as_numpy(state: NumpyState) -> Any:
    """A state as NumPy takes it."""
    kind, words, place, has_gauss, gauss = state
    return kind, np.frombuffer(bytes.fromhex(words), "<u4"), place, has_gauss, gauss


def _global_state() -> Any:
    return np.random.get_state()


def mlx_state() -> int:
    """The state of MLX's global generator, as a seed that brings it back."""
    words: Any = mx.random.state
    high, low = (int(word) for word in np.asarray(words[0]))
    return (high << 32) | low


@dataclass(frozen=True, slots=True)
class Best:
    """The lowest validation loss so far."""

    loss: float | None = None
    num_worse: int = 0
    """Validations since then."""

    def after(self, loss: float) -> Best:
        """What it is after one more validation."""
        if isfinite(loss) and (self.loss is None or loss < self.loss):
            return Best(loss)
        return Best(self.loss, self.num_worse + 1)


@dataclass(frozen=True, slots=True)
class Since:
    """What has been trained since the last report; `seconds` are this rank's own."""

    losses: tuple[float, ...] = ()
    tokens: int = 0
    seconds: float = 0.0

    def later(self, seconds: float) -> Since:
        """After some seconds more."""
        return replace(self, seconds=self.seconds + seconds)

    def trained(self, loss: float, tokens: int) -> Since:
        """After one batch more."""
        return replace(self, losses=(*self.losses, loss), tokens=self.tokens + tokens)


@dataclass(frozen=True, slots=True)
class Progress:
    """A run between two updates; the same on every rank but for the seconds."""

    iteration: int
    num_steps: int
    """Updates, part of what dropout masks depend on."""
    epoch: int
    offset: int
    """Batches of the epoch that have been seen."""
    epoch_state: NumpyState
    """Of NumPy's generator when the order of this epoch was drawn: it is the order."""
    numpy_state: NumpyState
    mlx_state: int
    trained_tokens: int = 0
    grad_norm: float = 0.0
    since: Since = Since()
    best: Best = Best()

    def to_json(self) -> dict[str, Any]:
        """As a manifest has it."""
        return asdict(self)

    def shared(self) -> dict[str, Any]:
        """What has to be the same on every rank."""
        return replace(self, since=replace(self.since, seconds=0.0)).to_json()

    @staticmethod
    def from_json(values: dict[str, Any]) -> Progress:
        """What `to_json` made; raises a TypeError, KeyError or ValueError for anything else."""
        since, best = values["since"], values["best"]
        states: dict[str, Any] = {name: _state_from_json(values[name]) for name in ("epoch_state", "numpy_state")}
        since = Since(tuple(since["losses"]), since["tokens"], since["seconds"])
        parts: dict[str, Any] = {"since": since, "best": Best(**best)}
        return Progress(**{**values, **states, **parts})


def _state_from_json(values: Any) -> NumpyState:
    kind, words, place, has_gauss, gauss = values
    return kind, words, place, has_gauss, gauss
