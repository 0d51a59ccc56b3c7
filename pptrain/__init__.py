"""Pipeline-parallel training of language models on MLX, bit-equal to one device.

A module knows only what is to its left, and the data go the same way. The order of the modules: errors, compiling,
model, structure, lazy, values, trace, replay, unseen, partition, microbatch, segment, stage, graph, sizes, schedule,
simulate, interleaved, zero_bubble, v_shape, registry, auto, plan, advice, program, notation, deadlock, verify, promela,
lowered, executor, profile, optimizer, durable, checkpoint, reference, dry_run, pipeline, checks, config, agreement,
data, recipe, fetch, progress, stream, quantization, outline, machine, layer_sizes, train, report, timeline, svg,
perfetto, show, store, saving, resume, stopping, record, job, demo, demo_run, launch, doctor, plan_run, shrink, pattern,
invent, sound, target, page, mlx_lm_step, validate, verdicts, validate_run, chart, report_page, report_run, cli.
"""

from pptrain import reference
from pptrain.pipeline import Pipeline

__all__ = ["Pipeline", "reference"]
