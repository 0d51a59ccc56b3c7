"""`pptrain schedule`: what it prints, writes and checks."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from pptrain.cli import main
from pptrain.lowered import makespan, time_program
from pptrain.notation import parse_program, program_to_csv
from pptrain.program import Message, Receive, Send, lower
from pptrain.registry import SCHEDULES
from pptrain.schedule import Action
from pptrain.simulate import Costs, simulate


def shown(capsys, *argv):
    """Exit code and standard output."""
    code = main(["schedule", *argv])
    return code, capsys.readouterr().out


def test_the_text_has_timeline_bubble_peaks_and_verdicts(capsys):
    code, out = shown(capsys, "1f1b", "--stages", "3", "--microbatches", "3")
    assert code == 0
    assert "stage 0   F0 F1 F2 .  .  B0 .  B1 .  B2\n" in out
    assert "bubble 40.00%   longest span 15   makespan 15" in out
    assert "residual peaks 3 2 1" in out
    assert out.count(" yes\n") + out.endswith(" yes\n") * 0 >= 8


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("lanes", ["single", "direction"])
def test_every_named_schedule_is_proven_and_described_in_json(name, lanes, capsys):
    code, out = shown(capsys, name, "--stages", "3", "--microbatches", "5", "--lanes", lanes, "--json")
    found = json.loads(out)
    schedule = SCHEDULES[name](3, 5)
    assert code == 0
    assert (found["schedule"], found["num_stages"], found["num_microbatches"]) == (name, 3, 5)
    assert found["actions"] == [[str(action) for action in row] for row in schedule.actions]
    assert found["residual_peaks"] == list(simulate(schedule).most_residuals)
    assert found["lowered_makespan"] >= found["makespan"] >= found["span"] > 0
    assert all(found["verdicts"][name] for name in ("complete", "ordered", "matched", "order_consistent"))
    expected = {"0": lanes == "single", "1": True, "unbounded": True}
    assert found["verdicts"]["deadlock_free"] in (expected, {"0": True, "1": True, "unbounded": True})
    text = "\n".join(",".join(row) for row in found["program"])
    assert program_to_csv(parse_program(text, schedule.placement)) == text + "\n"


def test_costs_are_of_one_ranks_work_however_many_stages_share_it(capsys):
    spans = [
        json.loads(shown(capsys, name, "--microbatches", "16", "--costs", "10,8,6,0", "--json")[1])["span"]
        for name in ("zb-h2", "zb-v")
    ]
    assert all(16 * 24 <= span < 16 * 24 * 1.1 for span in spans)


def test_files_are_written_and_a_program_is_checked_again(tmp_path, capsys):
    options = [f"--{kind}={tmp_path / kind}" for kind in ("csv", "program", "promela", "svg", "trace")]
    code, _ = shown(capsys, "zb-h1", "--stages", "3", "--microbatches", "4", *options)
    assert code == 0
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 3 * 4 * 3
    picture = ElementTree.fromstring((tmp_path / "svg").read_text())
    titles = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 1 + 3 * 4 * 3
    assert "2W3" in titles
    assert "proctype" in (tmp_path / "promela").read_text()
    for name in ("csv", "program"):
        code, out = shown(capsys, "--check", str(tmp_path / name), "--capacity", "0")
        assert code == 0, out


def test_a_wrong_program_ends_with_1_and_the_counter_example(tmp_path, capsys):
    path = tmp_path / "wrong.csv"
    path.write_text("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1F1,1RECV_F0,1F0\n")
    code, out = shown(capsys, "--check", str(path), "--capacity", "unbounded", "--lanes", "direction")
    assert code == 1
    assert "order consistent" in out
    assert "0F0" in out
    assert "0F1" in out


def test_a_residual_limit_that_is_broken_ends_with_1(capsys):
    code, out = shown(capsys, "gpipe", "--stages", "2", "--microbatches", "4", "--residual-limit", "3")
    assert code == 1
    assert "within limit                      no: " in out


def test_a_schedule_from_a_csv_is_shown_like_a_named_one(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    code, out = shown(capsys, str(path), "--json")
    assert code == 0
    assert json.loads(out)["num_stages"] == 2


def test_auto_is_never_longer_than_a_named_schedule_within_the_limit(capsys):
    sizes = ["--stages", "4", "--microbatches", "8", "--costs", "10,9,5,0.5", "--json"]
    _, out = shown(capsys, "auto", "--residual-limit", "4", *sizes)
    found = json.loads(out)
    assert max(found["residual_peaks"]) <= 4
    assert found["span"] <= json.loads(shown(capsys, "zb-h1", *sizes)[1])["span"]


def test_auto_comes_nearer_where_the_input_part_frees_a_share_of_the_residuals(capsys):
    sizes = ["--stages", "4", "--microbatches", "12", "--costs", "18.5,18.1,9.3,0.6", "--residual-limit", "8", "--json"]
    whole, shared = (
        json.loads(shown(capsys, "auto", *sizes, "--weight-share", share)[1])["bubble"] for share in ("1", "0.3")
    )
    assert shared < whole


def test_a_comparison_has_a_row_for_every_schedule(capsys):
    code, out = shown(capsys, "--compare", "--stages", "4", "--microbatches", "8")
    assert code == 0
    assert [line.split(" | ")[0].strip("| ") for line in out.splitlines()[2 : 2 + len(SCHEDULES)]] == list(SCHEDULES)
    assert "| 1f1b | 1 | 27.27% | 33 | 4 3 2 1 | 33 | 33 |" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "No schedule is named"),
        (["1f1"], "Did you mean 1f1b"),
        (["1f1b", "--stages", "0"], "0 ranks"),
        (["1f1b", "--costs", "1,2"], "'1,2' is not F,I,W,COMM"),
        (["1f1b", "--costs", "1,0,1,0"], "has a negative cost"),
        (["auto"], "Give --residual-limit"),
        (["gpipe", "--virtual", "2"], "2 stages a rank"),
        (["nowhere.csv"], "[nowhere.csv] Cannot be read"),
        (["--check", "nowhere.csv"], "[nowhere.csv] Cannot be read"),
        (["1f1b", "--svg", "/nowhere/a.svg"], "[/nowhere/a.svg] Cannot be written"),
    ],
)
def test_a_mistake_is_one_message(argv, said, capsys):
    code = main(["schedule", *argv])
    error = capsys.readouterr().err
    assert code in (1, 2)
    assert said in error
    assert "Traceback" not in error


# -- the program on the clock ------------------------------------------------------------------------------------------


def test_a_single_lane_without_buffers_keeps_both_ends_busy_while_a_message_travels():
    schedule, costs = SCHEDULES["gpipe"](2, 2), Costs({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}, 0.5)
    single = time_program(lower(schedule, "single", {1}), costs, "single")
    directional = time_program(lower(schedule, "directional", {1}), costs, "directional")
    first = {str(span.action): (span.start, span.end) for span in single[0]}
    # F0 ends at 1, its message at 1.5; directional lanes let F1 start at 1.
    assert first["0F1"] == (1.5, 2.5)
    assert {str(span.action): span.start for span in directional[0]}["0F1"] == 1.0
    assert makespan(directional) == simulate(schedule, costs).makespan


def test_on_a_single_lane_a_sender_waits_for_a_receiver_that_is_busy():
    message = Message(0, "F", 0)
    sender = [Action(0, "F", 0), Send(message, 1), Action(0, "F", 1)]
    receiver = [Action(1, "W", 9), Receive(message, 0), Action(1, "F", 0)]
    rows = time_program([sender, receiver], Costs({"F": 1.0, "I": 1.0, "W": 5.0}, 0.5), "single")
    starts = {str(span.action): span.start for row in rows for span in row}
    assert starts == {"0F0": 0.0, "0F1": 5.5, "1W9": 0.0, "1F0": 5.5}


@pytest.mark.parametrize("name", SCHEDULES)
def test_with_instant_messages_directional_lanes_cost_nothing_where_receives_are_late_enough(name):
    schedule = SCHEDULES[name](3, 6)
    spans = time_program(lower(schedule, "directional", range(1, schedule.num_stages)), Costs(), "directional")
    assert [[span.action for span in row] for row in spans] == [list(row) for row in schedule.actions]
    assert makespan(spans) >= simulate(schedule).makespan


def test_a_program_that_cannot_run_is_told_with_where_it_stands():
    programs = lower(SCHEDULES["1f1b"](2, 2), "single", {1})
    programs[1].insert(0, Action(1, "F", 0))
    programs[1].remove(next(i for i in programs[1] if "RECV" in str(i)))
    with pytest.raises(Exception, match="rank 0 at 0SEND_F0"):
        time_program(programs, Costs(), "single")
