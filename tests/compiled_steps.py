"""Steps of a compiled pipeline and of one device, started by `test_pipeline` with `mx.compile` turned on.

    python tests/compiled_steps.py

Prints what was found as JSON: the greatest relative difference of each step, how many functions are kept, and what is
said of a model that cannot be compiled.
"""

import json

import mlx.core as mx
from mlx.utils import tree_map
from odd_models import Counted, built
from tiny import batch, put_lora_on, relative_difference, tiny

from pptrain import Pipeline, reference
from pptrain.errors import ModelError

WIDTHS = range(3, 13)


def main() -> None:
    model = tiny(2)
    put_lora_on(model)
    pipeline = Pipeline(model, 2, compile=True)
    differences = []
    for step, seq in enumerate([6, 6, 6, *WIDTHS, 6]):
        rows = batch(4, seq, seed=step)
        result = pipeline.value_and_grad(*rows, 2)
        one = reference.value_and_grad(model, *rows, 2)
        differences.append(relative_difference(result.grads, one.grads))
        differences.append(abs(result.loss.item() - one.loss.item()) / one.loss.item())
        # Trained weights change at every step, as an optimizer changes them, and at every other the frozen ones too.
        changed = model.parameters() if step % 2 else model.trainable_parameters()
        model.update(tree_map(lambda array: array * 1.25, changed))
    kept = [len(segment._compiled) for stage in range(2) for segment in pipeline.stage(stage)._segments]
    print(json.dumps({"differences": differences, "kept": kept, "is_on": is_on(), "refused": refused()}))


def refused() -> str:
    """What is said of a forward that looks at its tokens."""
    try:
        Pipeline(built(Counted), 2, compile=True).value_and_grad(*batch(4, 6), 2)
    except ModelError as error:
        return str(error)
    return ""


def is_on() -> bool:
    """Whether `mx.compile` compiles here: a compiled function is traced once for arguments of the same shapes."""
    traced = []

    @mx.compile
    def double(x: mx.array) -> mx.array:
        traced.append(x)
        return x + x

    mx.eval(double(mx.array(1.0)), double(mx.array(2.0)))
    return len(traced) == 1


if __name__ == "__main__":
    main()
