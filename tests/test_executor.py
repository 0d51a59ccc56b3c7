"""The loop over instructions: two stages in the loopback, their programs written by hand or lowered."""

import itertools

import mlx.core as mx
import pytest
from listening import Listening
from pictures import read
from tiny import batch, count_layer_forwards, is_lazy, leaves, same_bits, tiny

from pptrain import reference
from pptrain.errors import ScheduleError
from pptrain.executor import Executor
from pptrain.microbatch import count_tokens, cross_entropy, cut
from pptrain.partition import ranges
from pptrain.program import Message, Receive, Send, lower
from pptrain.schedule import Action, forward_only, loop, one_f_one_b
from pptrain.segment import Cut, Work
from pptrain.stage import Stage
from transports import DeadlockError, LoopbackWorld

F, B = Action(0, "F", 0), Action(0, "B", 0)


def stages_of(model, sizes):
    shared = Cut.of(model, mx.zeros((1, 4), mx.int32), cross_entropy)
    return [Stage(shared, stage, layers) for stage, layers in enumerate(ranges(sizes))]


def works_of(rows=4, m=1):
    microbatches = cut(*batch(rows), m)
    count = mx.array(count_tokens(microbatches), mx.float32)
    return [Work(microbatch, j, count, 0, 0) for j, microbatch in enumerate(microbatches)]


def executors_of(stages, programs, world=None, keep=True):
    world, placement = world or LoopbackWorld(len(stages)), range(len(stages))
    ranks = zip(placement, stages, programs, strict=True)
    return world, [Executor(program, {r: s}, placement, world.transport(r), keep) for r, s, program in ranks]


def run(stages, programs, works, world=None, keep=True):
    world, executors = executors_of(stages, programs, world, keep)
    world.run({rank: executor.run(works) for rank, executor in enumerate(executors)})
    return executors


def lowered(schedule):
    return lower(schedule, "directional", range(1, schedule.num_stages))


def test_a_forward_whose_boundary_was_not_received_is_refused_naming_the_message():
    stages = stages_of(tiny(2), (1, 1))
    with pytest.raises(ScheduleError, match=r"\[executor\] 0F0 is needed before its receive"):
        run(stages, [[F], [Action(1, "F", 0)]], works_of())


@pytest.mark.parametrize("kind", ["B", "I"])
def test_a_backward_whose_cotangent_was_not_received_is_refused_naming_the_message(kind):
    down, up = Message(0, "F", 0), Message(1, "B", 0)
    first = [F, Send(down, 1), Action(0, kind, 0), Receive(up, 1)]
    second = [Receive(down, 0), Action(1, "F", 0), Action(1, "B", 0), Send(up, 0)]
    with pytest.raises(ScheduleError, match=r"\[executor\] 1B0 is needed before its receive"):
        run(stages_of(tiny(2), (1, 1)), [first, second], works_of())


def test_one_receive_serves_one_action():
    down = Message(0, "F", 0)
    second = [Receive(down, 0), Action(1, "F", 0), Action(1, "F", 0)]
    with pytest.raises(ScheduleError, match="0F0 is needed before its receive"):
        run(stages_of(tiny(2), (1, 1)), [[F, Send(down, 1)], second], works_of())


def test_a_deadlock_is_reported_with_the_instruction_at_which_each_rank_stands():
    up, down = Message(1, "B", 0), Message(0, "F", 1)
    first = [F, Send(Message(0, "F", 0), 1), Receive(up, 1)]
    second = [Receive(Message(0, "F", 0), 0), Action(1, "F", 0), Receive(down, 0)]
    with pytest.raises(DeadlockError) as caught:
        run(stages_of(tiny(2), (1, 1)), [first, second], works_of(m=2))
    assert "rank 0 stands at 0RECV_B0 (instruction 2) and waits for 1B0 from rank 1" in str(caught.value)
    assert "rank 1 stands at 1RECV_F1 (instruction 2) and waits for 0F1 from rank 0" in str(caught.value)


def test_spans_are_the_actions_in_their_order_one_after_another_on_the_ranks_own_clock():
    ticks = itertools.count()
    world = LoopbackWorld(2, timer=lambda: float(next(ticks)))
    executors = run(stages_of(tiny(2), (1, 1)), lowered(one_f_one_b(2, 3)), works_of(m=3), world)
    expected = read("""stage 0   F0 F1 .  B0 F2 B1 .  B2
                       stage 1   .  F0 B0 F1 B1 F2 B2""")
    for executor, actions in zip(executors, expected.actions, strict=True):
        assert tuple(span.action for span in executor.spans) == actions
        times = [time for span in executor.spans for time in (span.start, span.end)]
        assert times == sorted(set(times))


def test_a_forward_evaluates_its_output_and_nothing_of_the_backward():
    [stage], [work] = stages_of(tiny(3), (3,)), works_of()
    run([stage], [[F]], [work])
    assert count_layer_forwards(stage.losses[0]) == 0
    grads = next(stage.backward(0, []))
    # The backward's own products are still to come; the forward's are not.
    assert count_layer_forwards(*grads) == 0
    assert all(is_lazy(array) for array in grads)


@pytest.mark.parametrize("parts", [["B"], ["I", "W"]])
def test_a_backward_evaluates_the_sums_of_its_gradients(parts):
    [stage], works = stages_of(tiny(2), (2,)), works_of(m=2)
    program = [Action(0, kind, j) for j in range(2) for kind in ["F", *parts]]
    run([stage], [program], works)
    assert stage.grads
    assert not [name for name, grad in stage.grads.items() if is_lazy(grad)]


def test_an_input_part_hands_its_cotangent_down_before_the_weight_part():
    model, [work] = tiny(2), works_of()
    stages, down, up = stages_of(model, (1, 1)), Message(0, "F", 0), Message(1, "B", 0)
    first = [F, Send(down, 1), Receive(up, 1), B]
    second = [Receive(down, 0), *(Action(1, kind, 0) for kind in "FI"), Send(up, 0), Action(1, "W", 0)]
    run(stages, [first, second], [work])
    expected = leaves(reference.value_and_grad(model, *batch(), 1).grads)
    found = {name: grad for stage in stages for name, grad in stage.grads.items()}
    assert found.keys() == expected.keys()
    assert [name for name in found if not same_bits(found[name], expected[name])] == []


@pytest.mark.parametrize(
    ("schedule", "expected"), [(forward_only(loop(2), 2), []), (one_f_one_b(2, 2), ["1B0", "1B1"])]
)
def test_an_evaluation_keeps_no_residuals_and_expects_no_cotangent(schedule, expected):
    model, works, is_training = tiny(2), works_of(m=2), schedule.name == "1f1b"
    stages, world = stages_of(model, (1, 1)), Listening(2)
    executors = run(stages, lowered(schedule), works, world, keep=is_training)
    assert world.expected == [expected, ["0F0", "0F1"]]
    assert [stage.max_live_residuals for stage in stages] == ([2, 1] if is_training else [0, 0])
    forwards = [str(span.action) for executor in executors for span in executor.spans if span.action.kind == "F"]
    assert forwards == ["0F0", "0F1", "1F0", "1F1"]
    one = reference.value_and_grad(model, *batch(), 2).losses
    assert [stages[1].losses[j].item() for j in range(2)] == [loss.item() for loss in one]


def test_a_run_waits_at_its_end_until_its_last_message_has_left():
    """With room for no message on the wire, one has left when the other rank takes it, and here that one does not."""
    programs = [[F, Send(Message(0, "F", 0), 1)], []]
    world, [first, _] = executors_of(stages_of(tiny(2), (1, 1)), programs, LoopbackWorld(2, capacity=0))

    def waits_for_rank_0(transport):
        yield transport.barrier()

    with pytest.raises(DeadlockError, match=r"rank 0 stands at 0SEND_F0 \(instruction 1\) and waits for 0F0 to leave"):
        world.run({0: first.run(works_of()), 1: waits_for_rank_0(world.transport(1))})
