"""Pipeline-parallel training of language models on MLX, bit-equal to one device.

The data's way is the order of the modules: errors, model, partition, stage, microbatch, schedule, program, executor,
optimizer, checkpoint, pipeline, train, timeline, cli.
"""

from pptrain import reference
from pptrain.pipeline import Pipeline

__all__ = ["Pipeline", "reference"]
