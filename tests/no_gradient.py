"""A model whose last layer does what MLX has no gradient for; copied into a model directory as its `model_file`."""

import mlx.core as mx
from mlx_lm.models import llama

ModelArgs = llama.ModelArgs


class BitsLayer(llama.TransformerBlock):
    def __call__(self, x, mask=None, cache=None):
        return super().__call__(x.view(mx.uint32).view(mx.float32), mask, cache)


class Model(llama.Model):
    def __init__(self, args):
        super().__init__(args)
        self.model.layers[-1].__class__ = BitsLayer
