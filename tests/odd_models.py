"""Models whose layers hand on more than one hidden state, and models that cannot be cut."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tiny import Layer, Tiny


def built(kind: type[Tiny], num_layers: int = 4, *, seed: int = 0, **options: Any) -> Tiny:
    mx.random.seed(seed)
    model = kind(num_layers, **options)
    mx.eval(model.parameters())
    return model


# -- models that can be cut --------------------------------------------------------------------------------------------


class TwoStreamLayer(nn.Module):
    def __init__(self, wide: int, narrow: int):
        super().__init__()
        self.down, self.up = nn.Linear(wide, narrow), nn.Linear(narrow, wide)

    def __call__(self, wide: mx.array, narrow: mx.array) -> dict[str, mx.array]:
        return {"wide": wide + mx.sin(self.up(narrow)), "narrow": narrow + mx.sin(self.down(wide))}


class TwoStreams(Tiny):
    """Two parallel streams of different widths, handed on in a dict."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.narrow = nn.Embedding(23, 4)
        self.layers = [TwoStreamLayer(8, 4) for _ in range(num_layers)]

    def __call__(self, tokens: mx.array) -> mx.array:
        streams = {"wide": self.embed(tokens), "narrow": self.narrow(tokens)}
        for layer in self.layers:
            streams = layer(**streams)
        return self.head(self.norm(streams["wide"]))


class ReaderLayer(Layer):
    def __call__(self, hidden: mx.array, earlier: mx.array | None) -> mx.array:
        return super().__call__(hidden if earlier is None else hidden + mx.tanh(earlier))


class ReadsTwoBefore(Tiny):
    """A layer reads the output of the layer two before it."""

    layer_kind = ReaderLayer

    def __call__(self, tokens: mx.array) -> mx.array:
        made = [self.embed(tokens)]
        for i, layer in enumerate(self.layers):
            made.append(layer(made[-1], made[i - 1] if i >= 2 else None))
        return self.head(self.norm(made[-1]))


class SharedBlock(Tiny):
    """A block outside of the layers is used after every third."""

    def __init__(self, num_layers: int = 7, **options: Any):
        super().__init__(num_layers, **options)
        self.shared = Layer(8)

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if i % 3 == 0:
                hidden = self.shared(hidden)
        return self.head(self.norm(hidden))


class StateLayer(Layer):
    """Takes and returns a tuple: a hidden state, positions, a number, None; fills a dict that it is given."""

    def __call__(self, state: tuple[Any, ...], store: dict[str, mx.array], skip: mx.array) -> tuple[Any, ...]:
        hidden, chosen, count, _ = state
        store.setdefault("first", mx.tanh(hidden))
        hidden = super().__call__(hidden) + store["first"] * skip
        return hidden, mx.argmax(hidden, axis=-1) + chosen, count + 1, None


class Everything(Tiny):
    """A float, an integer, a number and None are handed on; the first layer's value and the embedding go to all."""

    layer_kind = StateLayer

    def __call__(self, tokens: mx.array) -> mx.array:
        skip, store = self.embed(tokens), dict[str, mx.array]()
        state = (skip, mx.zeros(tokens.shape, mx.uint32), 0, None)
        for layer in self.layers:
            state = layer(state, store, skip)
        hidden, chosen, count, _ = state
        return self.head(self.norm(hidden)) + (chosen[..., None] % 2) / count


class Looped(Tiny):
    """The stack is run twice, with a norm after each time."""

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        for _ in range(2):
            for layer in self.layers:
                hidden = layer(hidden)
            hidden = self.norm(hidden)
        return self.head(hidden)


class Backwards(Tiny):
    """The layers are called in descending order."""

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        for layer in reversed(self.layers):
            hidden = layer(hidden)
        return self.head(hidden)


class ByParts(Tiny):
    """The model calls what is in a layer, and never the layer."""

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer.dropout(mx.sin(layer.linear(hidden)))
        return self.head(self.norm(hidden))


# -- models that cannot ------------------------------------------------------------------------------------------------


class CountingLayer(Layer):
    def __init__(self, hidden: int):
        super().__init__(hidden)
        self.num_calls = 0

    def __call__(self, hidden: mx.array) -> mx.array:
        self.num_calls += 1
        return super().__call__(hidden) * (1 + 0.1 * self.num_calls)


class Counting(Tiny):
    """A layer keeps Python state between calls."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.layers[1] = CountingLayer(8)


class BorrowingLayer(Layer):
    def __init__(self, hidden: int, other: Layer):
        super().__init__(hidden)
        object.__setattr__(self, "borrow", lambda: other.linear.weight)

    def __call__(self, hidden: mx.array) -> mx.array:
        return super().__call__(hidden) + mx.cos(hidden @ self.borrow())


class Borrowing(Tiny):
    """A layer reads another layer's weights."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.layers[2] = BorrowingLayer(8, self.layers[0])


class OverwritingLayer(Layer):
    def __call__(self, hidden: mx.array) -> mx.array:
        made = super().__call__(hidden)
        hidden[..., 0] = 0
        return made


class Overwriting(Tiny):
    """A layer changes its input in place, and the model goes on with it."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.layers[1] = OverwritingLayer(8)

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden) + 0.5 * hidden
        return self.head(self.norm(hidden))


class ScratchLayer(Layer):
    def __init__(self, hidden: int, dropout: float = 0.0):
        super().__init__(hidden, dropout)
        self._doubled = None

    def __call__(self, hidden: mx.array) -> mx.array:
        self._doubled = 2 * self.linear.bias
        made = super().__call__(hidden) + self._doubled
        hidden[..., 0] = 0
        return made


class Scratch(Tiny):
    """Layers keep what they make anew at each call, and change their input, which nobody uses any more."""

    layer_kind = ScratchLayer


class RememberingLayer(Layer):
    def __init__(self, hidden: int):
        super().__init__(hidden)
        self._before = mx.zeros((hidden,))

    def __call__(self, hidden: mx.array) -> mx.array:
        made = super().__call__(hidden) + self._before
        self._before = mx.stop_gradient(made.mean(axis=(0, 1)))
        return made


class BitsLayer(Layer):
    def __call__(self, hidden: mx.array) -> mx.array:
        return super().__call__(hidden.view(mx.uint32).view(mx.float32))


class WithoutGradient(Tiny):
    """A layer does what MLX has no gradient for."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.layers[2] = BitsLayer(8)


class Remembering(Tiny):
    """A layer adds what it made at the call before."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.layers[1] = RememberingLayer(8)


class TwiceLayer(Layer):
    def __init__(self, hidden: int, shared: Layer):
        super().__init__(hidden)
        object.__setattr__(self, "shared", lambda: shared)

    def __call__(self, hidden: mx.array) -> mx.array:
        hidden = self.shared()(super().__call__(hidden))
        return self.shared()(mx.tanh(hidden))


class UsedTwice(Tiny):
    """A block outside of the layers is used twice by each."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.shared = Layer(8)
        self.layers = [TwiceLayer(8, self.shared) for _ in range(num_layers)]


class GatedLayer(Layer):
    def __call__(self, hidden: mx.array, gate: mx.array) -> mx.array:
        return super().__call__(hidden) * gate


class PerLayerTable(Tiny):
    """One table has a part for each layer, which all stages look up for themselves."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.table, self.up = nn.Embedding(23, 4 * num_layers), nn.Linear(4, 8, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden + self.up(self.table(tokens)[..., 4 * i : 4 * i + 4]))
        return self.head(self.norm(hidden))


class FromEmbedding(Tiny):
    """What is made of the embedding before the first layer is the last thing that a layer reads."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.gate = nn.Linear(8, 8)
        self.layers = [GatedLayer(8) for _ in range(num_layers)]

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        gate = mx.tanh(self.gate(hidden))
        for layer in self.layers:
            hidden = layer(hidden, gate)
        return self.head(self.norm(hidden))


class InTurnLayer(Layer):
    def __call__(self, hidden: mx.array, side: mx.array | None) -> tuple[mx.array, mx.array]:
        made = super().__call__(hidden)
        side = mx.tanh(made) if side is None else side
        return made + mx.sin(side), side


class InTurn(Tiny):
    """What the first layer makes is read behind the stack twice: one device adds all layers' terms in between."""

    layer_kind = InTurnLayer

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden, side = self.embed(tokens), None
        for layer in self.layers:
            hidden, side = layer(hidden, side)
        return self.head(self.norm((mx.cos(side) + hidden) * side))


class Between(Tiny):
    """What operations make of the embedding is used behind each of its layers, and no layer is given it."""

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        gate = mx.tanh(hidden)
        for layer in self.layers:
            hidden = layer(hidden) * gate
        return self.head(self.norm(hidden))


class EncoderDecoder(Tiny):
    """What is made of the encoder's output between the two lists is added to each decoder layer's input."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.between, self.start = nn.RMSNorm(8), nn.Embedding(23, 8)

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden, num_encoders = self.embed(tokens), len(self.layers) // 2
        for layer in self.layers[:num_encoders]:
            hidden = layer(hidden)
        encoded, hidden = self.between(hidden), self.start(tokens)
        for layer in self.layers[num_encoders:]:
            hidden = layer(hidden + encoded)
        return self.head(self.norm(hidden))


class MixedIn(Tiny):
    """The normalised embedding is mixed into what each layer reads."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.embed_norm = nn.RMSNorm(8)

    def __call__(self, tokens: mx.array) -> mx.array:
        first = hidden = self.embed_norm(self.embed(tokens))
        for layer in self.layers:
            hidden = layer(hidden + 0.1 * first)
        return self.head(self.norm(hidden))


class Projected(Tiny):
    """A projection of what the first layer makes is added to what three later ones read."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.project = nn.Linear(8, 8)

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.layers[0](self.embed(tokens))
        side = self.project(hidden)
        for layer in self.layers[1:]:
            hidden = layer(hidden + mx.sin(side))
        return self.head(self.norm(hidden))


class Mixer(nn.Module):
    """Returns a tuple, with what depends on no parameter; fills the dict that it is given; has parts of its own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def __call__(self, hidden: mx.array, store: dict[str, Any]) -> tuple[mx.array, mx.array, mx.array]:
        wide = mx.sin(self.up(hidden))
        store["made"] = [self.down(wide)]
        return wide, mx.arange(hidden.shape[1])[:, None] % 2, wide.sum(axis=-1, keepdims=True)


class Mixed(Tiny):
    """A module between layers is called twice, and several arrays of each call are used behind later layers."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.mixer = Mixer()

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden, store = self.embed(tokens), dict[str, Any]()
        wide, place, total = self.mixer(hidden, store)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden + wide[..., :8] * place) + store["made"][0]
            if i == 1:
                wide, place, _ = self.mixer(hidden * total, store)
        return self.head(self.norm(hidden) + total)


class Stack(nn.Module):
    """Holds layers, and a norm that is called between them and within them."""

    def __init__(self, layers: list[nn.Module], norm: nn.Module):
        super().__init__()
        self.layers, self.norm = layers, norm

    def __call__(self, hidden: mx.array, more: mx.array) -> mx.array:
        made = self.norm(more)
        for layer in self.layers:
            hidden = layer(hidden * made)
        return hidden


class Nested(Tiny):
    """Layers within modules, which are given what a table makes that the head reads too; a norm of layers and model."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options, tied=True)
        layers = [TwiceLayer(8, self.norm) for _ in range(num_layers)]
        self.stacks = [Stack(layers[:2], self.norm), Stack(layers[2:], nn.RMSNorm(8))]
        del self.layers

    @property
    def layers(self) -> list[nn.Module]:
        return [layer for stack in self.stacks for layer in stack.layers]

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = embedded = self.embed(tokens)
        for stack in self.stacks:
            hidden = stack(hidden, embedded)
        return self.embed.as_linear(self.norm(hidden))


class StoppingLayer(Layer):
    def __call__(self, hidden: mx.array, stopped: mx.array) -> tuple[mx.array, mx.array]:
        made = super().__call__(mx.tanh(stopped) + hidden)
        return mx.stop_gradient(made), made


class Stopping(Tiny):
    """Layers hand on what they make, with its gradient stopped and as it is."""

    layer_kind = StoppingLayer

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        stopped = first = mx.stop_gradient(hidden * 2)
        for layer in self.layers:
            stopped, hidden = layer(first + hidden, stopped)
        return self.head(self.norm(stopped + hidden))


class PhaseLayer(Layer):
    def __call__(self, hidden: mx.array, phase: mx.array) -> tuple[mx.array, mx.array]:
        made = super().__call__(hidden)
        phase = phase * mx.exp(1j * made)
        return made + 0.1 * (mx.real(phase) + mx.imag(phase)), phase


class Phases(Tiny):
    """A complex state is handed on beside the hidden one."""

    layer_kind = PhaseLayer

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden, phase = self.embed(tokens), mx.ones((*tokens.shape, 8), mx.complex64)
        for layer in self.layers:
            hidden, phase = layer(hidden, phase)
        return self.head(self.norm(hidden))


class DropsLate(Tiny):
    """What a dropout behind the second layer lets through of the embedding is given to each layer after it."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.layers, self.drop = [ReaderLayer(8, dropout=0.2) for _ in range(num_layers)], nn.Dropout(0.4)

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = embedded = self.embed(tokens)
        dropped = None
        for i, layer in enumerate(self.layers):
            dropped = self.drop(embedded) if i == 2 else dropped
            hidden = layer(hidden, dropped)
        return self.head(self.norm(hidden))


class Viewer(nn.Module):
    """Returns what it makes twice, and a view of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def __call__(self, hidden: mx.array) -> tuple[mx.array, ...]:
        made = self.linear(hidden)
        return made, made, made[..., :4]


class Viewed(Tiny):
    """What a module between layers makes is used behind later layers, and a view of it."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.viewer = Viewer()

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.layers[0](self.embed(tokens))
        made, _, half = self.viewer(hidden)
        for layer in self.layers[1:]:
            hidden = layer(hidden + made) + mx.concatenate([half, half], axis=-1)
        return self.head(self.norm(hidden))


class SpectralLayer(Layer):
    def __call__(self, spectrum: mx.array) -> mx.array:
        return mx.fft.rfft(super().__call__(mx.fft.irfft(spectrum, n=8)))


class Spectral(Tiny):
    """Layers hand on complex numbers."""

    layer_kind = SpectralLayer

    def __call__(self, inputs: mx.array) -> mx.array:
        spectrum = mx.fft.rfft(self.embed(inputs))
        for layer in self.layers:
            spectrum = layer(spectrum)
        return self.head(self.norm(mx.fft.irfft(spectrum, n=8)))


class Skipping(Tiny):
    """The model draws, before and behind layers that draw, too, which of them it skips, and noise."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, dropout=0.3, **options)

    def __call__(self, inputs: mx.array) -> mx.array:
        hidden = self.embed(inputs)
        for layer in self.layers:
            is_run = mx.random.uniform() < 0.5
            hidden = mx.where(is_run, layer(hidden), hidden) + 0.1 * mx.random.normal(hidden.shape)
        return self.head(self.norm(hidden))


@dataclass(frozen=True, slots=True)
class State:
    hidden: mx.array
    skips: deque[mx.array]


class StackingLayer(Layer):
    """Adds to the skips in the first half of the stack, and takes from them in the second."""

    def __init__(self, width: int, is_first_half: bool):
        super().__init__(width)
        self._is_first_half = is_first_half

    def __call__(self, state: State, noted: dict[str, float]) -> State:
        hidden = super().__call__(state.hidden)
        if self._is_first_half:
            state.skips.append(hidden)
            noted["scale"] = 0.5
        else:
            hidden = hidden + state.skips.pop() * noted.pop("scale", 1)
        return State(hidden, state.skips)


class Stacking(Tiny):
    """Layers hand on objects with slots, append to a deque and a dict that they are given, and take from them."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.layers = [StackingLayer(8, 2 * number < num_layers) for number in range(num_layers)]

    def __call__(self, inputs: mx.array) -> mx.array:
        state, noted = State(self.embed(inputs), deque()), dict[str, float]()
        for layer in self.layers:
            state = layer(state, noted)
        return self.head(self.norm(state.hidden))


MENDED = [EncoderDecoder, MixedIn, Projected, Mixed, Nested, Viewed]
"""What modules make between layers is used on both sides of a cut, and no layer is given it."""

CUTTABLE = [
    TwoStreams,
    ReadsTwoBefore,
    SharedBlock,
    Everything,
    Looped,
    Backwards,
    ByParts,
    Scratch,
    UsedTwice,
    FromEmbedding,
    DropsLate,
    Stopping,
    Phases,
    Spectral,
    Stacking,
    Skipping,
    *MENDED,
]


class ChoosingLayer(Layer):
    def __call__(self, hidden: mx.array) -> mx.array:
        return super().__call__(hidden) if hidden.sum().item() > 0 else hidden


class Choosing(Tiny):
    """A layer looks at its data to see what to do."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.layers[1] = ChoosingLayer(8)


class Counted(Tiny):
    """The forward looks at its tokens."""

    def __call__(self, inputs: mx.array) -> mx.array:
        if inputs.max().item() >= self.embed.weight.shape[0]:
            raise ValueError("no such token")
        return super().__call__(inputs)


class AveragingLayer(Layer):
    def __init__(self, width: int):
        super().__init__(width)
        self.batch_norm = nn.BatchNorm(width)

    def __call__(self, hidden: mx.array) -> mx.array:
        return super().__call__(self.batch_norm(hidden))


class Averaging(Tiny):
    """A layer keeps running means of what it sees."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.layers[1] = AveragingLayer(8)


class GateLayer(Layer):
    def __init__(self, width: int):
        super().__init__(width)
        self.gate = nn.Linear(width, 1)

    def __call__(self, hidden: mx.array) -> Any:
        gate = self.gate(hidden)
        made = super().__call__(hidden) * mx.sigmoid(gate)
        return (made, gate) if self.training else made


class TwoModes(Tiny):
    """Layers hand on more in training, and what is between layers reads a parameter then."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.scale = mx.ones((8,))
        self.layers = [GateLayer(8) for _ in range(num_layers)]

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden, gates = self.embed(tokens), mx.array(0.0)
        for layer in self.layers:
            made = layer(hidden)
            hidden = made[0] if self.training else made
            gates = gates + made[1] if self.training else gates
        return self.head(self.norm(hidden * self.scale + 0.1 * gates if self.training else hidden))


class CachingLayer(Layer):
    """In evaluation keeps what it makes of a weight, as long as the weight stays."""

    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__(width, dropout)
        self.weight = mx.ones((width,))
        self._scale: mx.array | None = None
        self._made_of: mx.array | None = None

    def __call__(self, hidden: mx.array) -> mx.array:
        if self.training:
            return super().__call__(hidden * (self.weight + 1))
        if self._scale is None or self._made_of is not self.weight:
            self._scale, self._made_of = self.weight + 1, self.weight
        return super().__call__(hidden * self._scale)


class Caching(Tiny):
    layer_kind = CachingLayer


class LongLayer(Layer):
    """Adds what a second module makes, where there are more tokens than a model is looked at with first."""

    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__(width, dropout)
        self.long = nn.Linear(width, width)

    def __call__(self, hidden: mx.array) -> mx.array:
        made = super().__call__(hidden)
        return made + mx.sin(self.long(made)) if hidden.shape[1] > 8 else made


class Longer(Tiny):
    """Long sequences read parameters of layers that short ones do not, as an indexer's."""

    layer_kind = LongLayer


class LongerHead(Tiny):
    """Long sequences read a parameter that no layer holds, and short ones do not."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self.long = nn.RMSNorm(8)

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.long(hidden) if tokens.shape[1] > 8 else self.norm(hidden))


class LongerStack(Tiny):
    """Long sequences pass through the layers once more."""

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        for layer in self.layers * (2 if tokens.shape[1] > 8 else 1):
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class AsideLayer(Layer):
    """Keeps what it makes where others may find it, and notes its mean in a list."""

    def __init__(self, width: int, notes: list[mx.array]):
        super().__init__(width)
        self._notes, self._made = notes, None

    def __call__(self, hidden: mx.array) -> mx.array:
        self._made = super().__call__(hidden)
        self._notes.append(self._made.mean())
        return self._made


class Aside(Tiny):
    """The head reads what layers have kept as their own."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self._notes = list[mx.array]()
        self.layers = [AsideLayer(8, self._notes) for _ in range(num_layers)]

    def __call__(self, inputs: mx.array) -> mx.array:
        logits = super().__call__(inputs)
        return logits * (1 + sum(layer._made.mean() for layer in self.layers))


class Noted(Aside):
    """The head reads a list that it is given by nobody, and that layers fill."""

    def __call__(self, inputs: mx.array) -> mx.array:
        self._notes.clear()
        logits = Tiny.__call__(self, inputs)
        return logits * (1 + sum(self._notes))


class SharingLayer(Layer):
    def __init__(self, width: int, first: dict[str, mx.array]):
        super().__init__(width)
        self._first = first

    def __call__(self, hidden: mx.array) -> mx.array:
        first = self._first.setdefault("first", hidden)
        return super().__call__(hidden) + mx.sin(first)


class Sharing(Tiny):
    """The first layer puts what it is given into a dict that all layers have."""

    def __init__(self, num_layers: int = 4, **options: Any):
        super().__init__(num_layers, **options)
        self._first = dict[str, mx.array]()
        self.layers = [SharingLayer(8, self._first) for _ in range(num_layers)]

    def __call__(self, inputs: mx.array) -> mx.array:
        self._first.clear()
        return super().__call__(inputs)


class PostponingLayer(Layer):
    def __call__(self, hidden: mx.array) -> Any:
        made = super().__call__(hidden)
        return lambda: made


class Postponing(Tiny):
    """Layers return closures over what they make."""

    layer_kind = PostponingLayer

    def __call__(self, inputs: mx.array) -> mx.array:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(hidden)()
        return self.head(self.norm(hidden))


class IteratingLayer(Layer):
    def __call__(self, hidden: mx.array) -> Any:
        return iter([super().__call__(hidden)])


class Iterating(Tiny):
    """Layers return iterators, each of which gives what it has once."""

    layer_kind = IteratingLayer

    def __call__(self, inputs: mx.array) -> mx.array:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = next(layer(hidden))
        return self.head(self.norm(hidden))


class Turning(Tiny):
    """The layers are called the other way round where there are several rows."""

    def __call__(self, inputs: mx.array) -> mx.array:
        hidden = self.embed(inputs)
        for layer in self.layers[:: -1 if len(inputs) > 1 else 1]:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


UNSEEN = [Aside, Noted, Sharing, Postponing, Iterating]
"""Something reads what a layer has made and not handed on."""

WRONG = [Choosing, Counting, Remembering, Borrowing, Overwriting, Averaging, Turning, *UNSEEN]
