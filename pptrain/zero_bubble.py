"""Backwards in two parts: the input part at once, since a rank waits for it, the weight part when time is left."""

from __future__ import annotations

from pptrain.schedule import Action, Schedule, straight


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B whose weight parts wait, on stage s for s microbatches: a third of its bubble, with its greatest memory.

    Every stage holds the residuals of at most P microbatches; the bubble is (P - 1)(F + I - W). With 3 ranks and 4
    microbatches::

        stage 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241, section 2.1
    """
    return straight("zb-h1", num_ranks, num_microbatches, lambda stage, m: _row(stage, m, num_ranks - 1 - stage, stage))


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Forwards fill the warmup, weight parts the cooldown: with F = I = W no rank waits between its first and last.

    Every stage holds the residuals of at most 2P - 1 microbatches; the bubble is (P - 1)(F + I - 2W). With 3 ranks and
    6 microbatches::

        stage 0   F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
        stage 1   .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
        stage 2   .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241, section 2.2
    """
    return straight(
        "zb-h2", num_ranks, num_microbatches, lambda stage, m: _row(stage, m, 2 * (num_ranks - 1 - stage), 2 * stage)
    )


def _row(stage: int, num_microbatches: int, warmup: int, delay: int) -> list[Action]:
    """Warmup; forward and input part in turn; then forward, input part and weight part; then what is left.

    Args:
        stage: Whose actions.
        num_microbatches: How many there are.
        warmup: Forwards before the first that an input part follows.
        delay: How many input parts the first weight part waits for, beyond its own.
    """
    row = [Action(stage, "F", j) for j in range(min(warmup, num_microbatches))]
    for j in range(num_microbatches):
        if warmup + j < num_microbatches:
            row.append(Action(stage, "F", warmup + j))
        row.append(Action(stage, "I", j))
        if j >= delay:
            row.append(Action(stage, "W", j - delay))
    return row + [Action(stage, "W", j) for j in range(max(0, num_microbatches - delay), num_microbatches)]
