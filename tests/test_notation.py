import pytest

from pptrain.errors import ScheduleError
from pptrain.notation import read_csv, write_csv
from pptrain.registry import SCHEDULES
from pptrain.simulate import simulate


def test_a_schedule_is_read_from_rows_of_actions_with_bubbles_left_empty():
    schedule = read_csv("0F0,0F1,,,0I0,0W0,0B1\n,1F0,1I0,1F1,1B1,1W0,\n")
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (2, 2, 2)
    assert [str(action) for action in schedule.actions[1]] == ["1F0", "1I0", "1F1", "1B1", "1W0"]
    assert simulate(schedule).makespan > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_written_is_read_again(name):
    schedule = SCHEDULES[name](3, 4)
    assert read_csv(write_csv(schedule), name) == schedule


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("0F0,0X0\n", r"Row 1, cell 2 is '0X0'\. Expected a stage, one of F, B, I, W"),
        ("0F0\n1F0,F1\n", r"Row 2, cell 2 is 'F1'"),
        ("0F0\n1F0,0B0\n", r"0B0 stands in row 2, but stage 0 is rank 0's \(row 1\)"),
        ("0F0\n2F0\n", r"Stage 1 has no action"),
        ("", r"Stage 0 has no action"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_with_the_place(text, wrong):
    with pytest.raises(ScheduleError, match=wrong):
        read_csv(text)
