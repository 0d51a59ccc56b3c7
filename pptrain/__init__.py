"""Pipeline-parallel training of language models on MLX, bit-equal to one device.

A module knows only what is to its left, and the data go the same way. The order of the modules: errors, model,
partition, microbatch, stage, schedule, simulate, interleaved, zero_bubble, v_shape, registry, auto, program, notation,
deadlock, verify, promela, lowered, executor, optimizer, checkpoint, reference, pipeline, checks, config, agreement,
data, recipe, train, report, timeline, svg, perfetto, show, job, demo, demo_run, launch, machine, doctor, cli.
"""

from pptrain import reference
from pptrain.pipeline import Pipeline

__all__ = ["Pipeline", "reference"]
