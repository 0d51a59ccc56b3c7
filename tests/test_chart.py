"""Curves as SVG: every value has its place, gaps stay gaps, and no spike is lost."""

import math
import re
from xml.etree import ElementTree

import pytest

from pptrain.chart import Series, draw_chart, round_steps, thinned

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*series, **options):
    return ElementTree.fromstring(draw_chart("Loss", series, **options))


def lines(picture):
    """Points of each line, as places."""
    found = picture.findall(f"{SVG}polyline")
    return [[tuple(map(float, pair.split(","))) for pair in each.get("points").split()] for each in found]


def titles(picture):
    return [title.text for title in picture.iter(f"{SVG}title")]


def test_places_follow_values_over_iterations():
    [line] = lines(drawn(Series("training", ((10, 4.0), (20, 2.0), (40, 1.0)))))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert (x2 - x0) / (x1 - x0) == pytest.approx(3, abs=0.01)
    assert (y2 - y0) / (y1 - y0) == pytest.approx(1.5, abs=0.01)
    assert y0 < y1 < y2


def test_every_value_can_be_pointed_at():
    assert titles(drawn(Series("training", ((1, 2.5), (1200, 1.25))))) == [
        "training, iteration 1: 2.5",
        "training, iteration 1,200: 1.25",
    ]


def test_a_value_that_is_not_finite_is_a_gap():
    values = [1.0, 2.0, math.nan, 3.0, 4.0, math.inf, 5.0]
    picture = drawn(Series("training", tuple(enumerate(values))))
    assert [len(line) for line in lines(picture)] == [2, 2]
    assert len(titles(picture)) == 5


def test_one_report_is_a_dot_in_the_middle():
    picture = drawn(Series("training", ((7, 3.0),)))
    assert lines(picture) == []
    dots = [each for each in picture.findall(f"{SVG}circle") if each.get("class") is None]
    assert len(dots) == 1
    assert 250 < float(dots[0].get("cx")) < 350


@pytest.mark.parametrize("points", [(), ((1, math.nan),)])
def test_without_a_value_there_is_no_picture(points):
    assert draw_chart("Loss", [Series("training", points)]) == ""


def test_several_lines_have_names_beside_their_colours():
    series = [Series(f"rank {rank}", ((1, 1.0 + rank), (2, 1.0 + rank))) for rank in range(9)]
    picture = drawn(*series)
    words = [text.text for text in picture.findall(f"{SVG}text")]
    assert [word for word in words if word.startswith("rank")] == [f"rank {rank}" for rank in reversed(range(9))]
    looks = [(line.get("style"), line.get("stroke-dasharray")) for line in picture.findall(f"{SVG}polyline")]
    assert len(set(looks)) == 9


def test_marks_within_the_iterations_are_upright_lines():
    picture = drawn(Series("training", ((1, 1.0), (9, 2.0))), marks=[5, 90])
    assert [line.get("class") for line in picture.findall(f"{SVG}line")].count("mark") == 1
    assert "a process began after iteration 5" in titles(picture)


def test_an_axis_may_begin_at_zero():
    words = [text.text for text in drawn(Series("norm", ((1, 5.0), (2, 9.0))), zero=True).findall(f"{SVG}text")]
    assert "0" in words
    assert "0" not in [text.text for text in drawn(Series("norm", ((1, 5.0), (2, 9.0)))).findall(f"{SVG}text")]


def test_a_name_is_escaped():
    assert "<b>" not in draw_chart("<b>", [Series("<b>", ((1, 1.0), (2, 1.0)))] * 2)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.3, 3.9, [0, 1, 2, 3, 4]),
        (0, 1e-5, [0, 2e-6, 4e-6, 6e-6, 8e-6, 1e-5]),
        (4.92, 4.99, [4.92, 4.94, 4.96, 4.98, 5.0]),
        (-3, 14, [-5, 0, 5, 10, 15]),
        (2, 2, [1, 1.5, 2, 2.5, 3]),
        (0, 0, [-1, -0.5, 0, 0.5, 1]),
        (1234567, 7654321, [0, 2e6, 4e6, 6e6, 8e6]),
    ],
)
def test_axes_have_few_round_numbers_that_enclose_the_values(low, high, expected):
    assert round_steps(low, high) == pytest.approx(expected)


def test_a_long_line_keeps_its_spikes_in_order_and_its_ends():
    points = [(i, math.sin(i / 100)) for i in range(10_000)]
    points[4321], points[8765] = (4321, 50.0), (8765, -50.0)
    kept = thinned(points, 100)
    assert len(kept) <= 200
    assert kept == sorted(kept)
    assert {(4321, 50.0), (8765, -50.0)} <= set(kept) <= set(points)
    assert thinned(points[:200], 100) == points[:200]


def test_a_long_run_is_a_picture_of_bounded_size():
    text = draw_chart("Loss", [Series("training", tuple((i, math.cos(i)) for i in range(100_000)))])
    assert len(text) < 120_000
    assert not re.search(r"nan|inf", text)
