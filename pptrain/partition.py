"""Layers -> contiguous stages. Pure; every layer in exactly one stage, in order."""

from __future__ import annotations

from collections.abc import Sequence

from pptrain.errors import PartitionError


def even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage when they are divided as evenly as can be.

    The remainder is spread, one layer for each of the stages in the middle: the first stage has the embedding and the
    last the head besides their layers, so those are the last to get one more::

        even(10, 3) == (3, 4, 3)
        even(30, 4) == (7, 8, 8, 7)

    Raises:
        PartitionError: If there are fewer layers than stages, or no stage.
    """
    _check_num_stages(num_layers, num_stages)
    share, extra = divmod(num_layers, num_stages)
    first = (num_stages - extra) // 2
    return tuple(share + (first <= stage < first + extra) for stage in range(num_stages))


def explicit(num_layers: int, sizes: Sequence[int], num_stages: int | None = None) -> tuple[int, ...]:
    """Layers of each stage as the user listed them, checked.

    Raises:
        PartitionError: If a stage is empty, if the sum is not the model's, or if the number of stages is another one.
    """
    sizes = tuple(sizes)
    text = ",".join(map(str, sizes))
    if num_stages is not None and num_stages != len(sizes):
        raise PartitionError(
            f"[layers] {text} lists {len(sizes)} stages, but {num_stages} stages were asked for. Expected one entry "
            f"for each stage. List {num_stages} entries, or leave out --stages."
        )
    _check_num_stages(num_layers, len(sizes))
    if min(sizes) < 1 or sum(sizes) != num_layers:
        raise PartitionError(
            f"[layers] {text} covers {sum(sizes)} layers with {min(sizes)} in its smallest stage, but the model has "
            f"{num_layers} layers. Expected every layer in exactly one stage and at least one layer in each. "
            f"An even cut is {','.join(map(str, even(num_layers, len(sizes))))}."
        )
    return sizes


def ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, as ranges of whole-model numbers."""
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _check_num_stages(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise PartitionError(
            f"[stages] {num_stages} stages were asked for. Expected at least 1. Use --stages 1 or more."
        )
    if num_layers < num_stages:
        layers = f"{num_layers} layer" + "s" * (num_layers != 1)
        raise PartitionError(
            f"[stages] Cannot divide {layers} into {num_stages} stages: every stage needs at least one layer. "
            f"Use between 1 and {num_layers} stages."
        )
