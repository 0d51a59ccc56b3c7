"""What is written is read again, and what is no program is refused with its place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import placed_schedules

from pptrain.errors import NotationError
from pptrain.notation import parse_program, placement_of, program_to_csv
from pptrain.program import lower
from pptrain.schedule import Schedule
from transports import Lanes


@given(placed=placed_schedules(), lanes=st.sampled_from(["single", "directional"]))
def test_a_program_that_was_written_is_read_again_with_its_placement(placed: tuple[Schedule, set[int]], lanes: Lanes):
    programs = lower(placed[0], lanes, placed[1])
    assert parse_program(program_to_csv(programs)) == programs
    assert placement_of(programs) == placed[0].placement


words = st.builds(
    "{}{}{}".format,
    st.integers(-1, 4),
    st.sampled_from(["F", "B", "I", "W", "SEND_F", "RECV_B", "SEND_W", "F-"]),
    st.integers(0, 9),
)


@given(text=st.text() | st.lists(words | st.sampled_from([",", "\n", ""]), max_size=12).map(",".join))
def test_any_text_is_read_or_refused_as_notation(text: str):
    try:
        programs = parse_program(text)
    except NotationError:
        return
    if any(programs):
        assert parse_program(program_to_csv(programs)) == programs
