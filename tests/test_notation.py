import pytest

from pptrain.errors import NotationError
from pptrain.notation import parse_program, placement_of, program_to_csv, read_schedule, stage_of
from pptrain.program import Message, Receive, Send, lower
from pptrain.registry import SCHEDULES
from pptrain.schedule import Action
from pptrain.simulate import simulate

TWO_STAGES = """\
0F0,0SEND_F0,0RECV_B0,0B0
1RECV_F0,1F0,1B0,1SEND_B0
"""


def test_a_program_is_read_with_the_ranks_of_its_messages():
    assert parse_program(TWO_STAGES) == (
        [Action(0, "F", 0), Send(Message(0, "F", 0), 1), Receive(Message(1, "B", 0), 1), Action(0, "B", 0)],
        [Receive(Message(0, "F", 0), 0), Action(1, "F", 0), Action(1, "B", 0), Send(Message(1, "B", 0), 0)],
    )


def test_the_parts_of_a_backward_are_read():
    [program] = parse_program("0F12,0I12,0W12")
    assert program == [Action(0, "F", 12), Action(0, "I", 12), Action(0, "W", 12)]


def test_what_was_written_is_read_again():
    for schedule in SCHEDULES.values():
        for lanes in ("single", "directional"):
            programs = lower(schedule(3, 4), lanes, {1, 2, 3, 4, 5})
            assert parse_program(program_to_csv(programs)) == programs
            assert placement_of(programs) == schedule(3, 4).placement
    assert program_to_csv(parse_program(TWO_STAGES)) == TWO_STAGES


def test_empty_cells_mean_nothing_and_an_empty_row_is_a_rank_without_work():
    assert parse_program("0F0,, 0B0 ,\n\n") == ([Action(0, "F", 0), Action(0, "B", 0)], [])
    assert parse_program(program_to_csv([[], [Action(0, "F", 0)], []])) == ([], [Action(0, "F", 0)], [])


def test_stages_lie_where_their_actions_stand():
    programs = parse_program("0F0,2F0,0SEND_F0,1SEND_F0\n1F0,3F0")
    assert placement_of(programs) == (0, 1, 0, 1)
    assert programs[0][2:] == [Send(Message(0, "F", 0), 1), Send(Message(1, "F", 0), 0)]


def test_a_stage_without_actions_lies_where_its_messages_stand():
    assert placement_of(parse_program("0F0,0SEND_F0\n1RECV_F0")) == (0, 1)


def test_a_given_placement_counts_more_than_the_text():
    [[send], _] = parse_program("0SEND_F0\n1F0", placement=(0, 0))
    assert send == Send(Message(0, "F", 0), 0)


def test_an_instruction_is_of_the_stage_in_front_of_it():
    for word in ("3F0", "3W0", "3SEND_F0", "3RECV_F0", "3SEND_B0", "3RECV_B0"):
        [[instruction]] = parse_program(word, placement=range(9))
        assert stage_of(instruction) == 3
        assert str(instruction) == word


@pytest.mark.parametrize(
    "word", ["F0", "0F", "0X1", "0f1", "0SEND_W1", "0SEND_F", "0SENDF1", "0RECV_I0", "1.5F0", "-1F0", "0F0 0B0", "0F٣"]
)
def test_a_cell_that_is_no_instruction_is_named_with_its_place(word):
    with pytest.raises(NotationError) as caught:
        parse_program(f"0F0\n1F0,,{word}")
    message = str(caught.value)
    assert "row 2 (rank 1), column 3" in message
    assert repr(word) in message
    assert "Expected an action such as 2F0" in message


@pytest.mark.parametrize(("word", "way"), [("0SEND_B0", "to"), ("0RECV_F0", "from")])
def test_an_edge_below_the_first_stage_is_refused(word, way):
    with pytest.raises(NotationError, match=rf"row 1 \(rank 0\), column 2\] {word} is a message {way} stage -1"):
        parse_program(f"0F0,{word}")


def test_an_edge_above_the_last_stage_is_refused():
    with pytest.raises(NotationError, match=r"column 2\] 0SEND_F0 speaks of stage 1, .* from 0 to 0"):
        parse_program("0F0,0SEND_F0")


def test_a_stage_that_stands_nowhere_is_named():
    with pytest.raises(NotationError, match=r"Stage 1 has no instruction .* though stage 2 has"):
        parse_program("0F0\n2F0")
    with pytest.raises(NotationError, match="Stage 0 has no instruction"):
        placement_of([[Action(1, "F", 0)]])


def test_an_empty_text_is_refused():
    with pytest.raises(NotationError, match="no row"):
        parse_program("")


def test_a_schedule_is_read_from_rows_of_actions_with_bubbles_left_empty():
    schedule = read_schedule("0F0,0F1,,,0I0,0W0,0B1\n,1F0,1I0,1F1,1B1,1W0,\n")
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (2, 2, 2)
    assert [str(action) for action in schedule.actions[1]] == ["1F0", "1I0", "1F1", "1B1", "1W0"]
    assert simulate(schedule).makespan > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_was_written_is_read_again(name):
    schedule = SCHEDULES[name](3, 4)
    assert read_schedule(program_to_csv(schedule.actions), name) == schedule


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("0F0,0X0\n", r"row 1 \(rank 0\), column 2\] '0X0' is no instruction"),
        ("0F0\n1F0,0B0\n", r"row 2 \(rank 1\)\] 0B0 stands here, but stage 0 is rank 0's \(row 1\)"),
        ("0F0,0SEND_F0\n1F0\n", r"row 1 \(rank 0\)\] 0SEND_F0 is a message\. Expected actions alone"),
        ("0F0\n2F0\n", "Stage 1 has no instruction"),
        ("", "The text has no row"),
    ],
)
def test_a_text_that_is_no_schedule_is_refused_with_the_place(text, wrong):
    with pytest.raises(NotationError, match=wrong):
        read_schedule(text)
