"""Tiny models and batches, and what it means that two trees are the same."""

from __future__ import annotations

import io
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama as mlx_lm_llama
from mlx_lm.tuner.utils import linear_to_lora_layers

VOCAB = 23


class Layer(nn.Module):
    """`h + sin(W h + b)`. The only `AddMM` in a graph is a layer's forward: its gradients are plain products."""

    def __init__(self, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def __call__(self, hidden: mx.array) -> mx.array:
        return hidden + self.dropout(mx.sin(self.linear(hidden)))


class Tiny(nn.Module):
    """Embedding, layers, norm and head: the least that is a language model."""

    layer_kind: type[nn.Module] = Layer

    def __init__(
        self, num_layers: int = 4, *, hidden: int = 8, vocab: int = VOCAB, tied: bool = False, dropout: float = 0.0
    ):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = [self.layer_kind(hidden, dropout) for _ in range(num_layers)]
        self.norm = nn.RMSNorm(hidden)
        if not tied:
            self.head = nn.Linear(hidden, vocab, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        return self.head(hidden) if "head" in self else self.embed.as_linear(hidden)


def tiny(num_layers: int = 4, *, seed: int = 0, dtype: mx.Dtype = mx.float32, **options: Any) -> Tiny:
    mx.random.seed(seed)
    model = Tiny(num_layers, **options)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}


def llama(num_layers: int = 4, *, seed: int = 0, dtype: mx.Dtype = mx.float32, **config: Any) -> mlx_lm_llama.Model:
    mx.random.seed(seed)
    args = mlx_lm_llama.ModelArgs.from_dict({**LLAMA, "num_hidden_layers": num_layers, **config})
    model = mlx_lm_llama.Model(args)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def put_lora_on(model: nn.Module, num_layers: int = -1, *, dropout: float = 0.0, seed: int = 1) -> None:
    """LoRA as mlx-lm puts it on, with `lora_b` off zero, where half of all gradients would be zero."""
    mx.random.seed(seed)
    model.freeze()
    linear_to_lora_layers(model, num_layers, {"rank": 2, "scale": 2.0, "dropout": dropout})
    for name, module in model.named_modules():
        if "lora_b" in module:
            module.lora_b = 0.1 * mx.random.normal(module.lora_b.shape).astype(module.lora_b.dtype)
            assert name
    mx.eval(model.parameters())


def batch(rows: int = 4, seq: int = 6, *, seed: int = 0, vocab: int = VOCAB) -> tuple[mx.array, mx.array]:
    """Random tokens; the rows' unmasked spans differ, and the first row starts after its first target."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, vocab, (rows, seq + 1), dtype=np.int32)
    lengths = [[2 if row == 0 else 1, seq - row % (seq - 1)] for row in range(rows)]
    return mx.array(tokens), mx.array(lengths, dtype=mx.int32)


def leaves(tree: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(tree))


def copied(tree: Any) -> dict[str, mx.array]:
    """The leaves of a tree as they are now, whatever is done to it later."""
    found = {name: mx.array(leaf) for name, leaf in leaves(tree).items()}
    mx.eval(found)
    return found


def count_layer_forwards(*arrays: mx.array) -> int:
    """How many forwards of a `Layer` an evaluation of these arrays would run."""
    picture = io.StringIO()
    mx.export_to_dot(picture, *arrays)
    return picture.getvalue().count('label ="AddMM"')


def is_lazy(array: mx.array) -> bool:
    """Whether an array is yet to be computed or read: an evaluated one has let go of what it comes from."""
    picture = io.StringIO()
    mx.export_to_dot(picture, array)
    return "shape=rectangle" in picture.getvalue()


def same_bits(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes(memoryview(a)) == bytes(memoryview(b))


def assert_bit_equal(found: Any, expected: Any) -> None:
    """Leaf by leaf: the same names in the same order, shapes, dtypes and bits."""
    mine, theirs = leaves(found), leaves(expected)
    assert list(mine) == list(theirs)
    assert mine, "nothing was compared"
    assert [name for name in mine if not same_bits(mine[name], theirs[name])] == []


def relative_difference(found: Any, expected: Any) -> float:
    """The greatest difference of any leaf, over the greatest value of that leaf."""
    mine, theirs = leaves(found), leaves(expected)
    assert mine.keys() == theirs.keys()
    assert mine, "nothing was compared"
    ratios = [(mx.abs(mine[n] - theirs[n]).max() / mx.abs(theirs[n]).max()).item() for n in mine]
    return max(ratios)
