import pytest
from odd_models import TwoStreams

from pptrain.cli import main

QUICK = ["--quick", "--variants", "full"]


def one_layer():
    return TwoStreams(1)


def refusal(capsys, *options):
    """What is said of options that are a user's mistake."""
    assert main(["validate", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0", "x", "-1", "2,0", "2,,3", "", "1.5"])
@pytest.mark.parametrize("flag", ["stages", "layers", "num-layers"])
def test_what_is_no_count_is_a_user_s_mistake(capsys, flag, text):
    said = refusal(capsys, "llama", f"--{flag}={text}")
    assert f"[{flag}] {text!r} was given. Expected whole numbers of at least 1" in said


def test_several_numbers_of_layers_are_a_user_s_mistake(capsys):
    assert "[num-layers] '4,5' was given. Expected one number" in refusal(capsys, "llama", "--num-layers", "4,5")


@pytest.mark.parametrize("options", [["--variants", "half"], ["--jobs", "x"], ["--stagse", "2"]])
def test_what_the_parser_refuses_names_the_help(capsys, options):
    said = refusal(capsys, "llama", *options)
    assert options[-1] in said
    assert "See pptrain validate --help." in said


def test_layers_of_another_number_of_stages_are_a_user_s_mistake(capsys):
    said = refusal(capsys, "odd_models:TwoStreams", "--layers", "2,2", "--stages", "3")
    assert "[layers] 2,2 lists 2 stages, but 3 stages were asked for" in said
    assert main(["validate", "odd_models:TwoStreams", *QUICK, "--layers", "2,2", "--stages", "2,3"]) == 0


def test_layers_that_are_not_all_layers_are_a_user_s_mistake_and_not_the_model_s(capsys):
    said = refusal(capsys, "odd_models:TwoStreams", "--layers", "1,1")
    assert "[layers] 1,1 covers 2 layers" in said
    assert "the model has 4 layers" in said


def test_more_stages_than_layers_are_a_user_s_mistake(capsys):
    said = refusal(capsys, "odd_models:TwoStreams", "--stages", "5")
    assert "[stages] Cannot divide 4 layers into 5 stages" in said
    assert "Cannot divide 1 layer into 2 stages" in refusal(capsys, f"{__name__}:one_layer")


@pytest.mark.parametrize("flag", ["json", "junit", "html"])
def test_a_directory_in_place_of_a_file_is_refused_before_the_work(capsys, tmp_path, flag):
    said = refusal(capsys, "odd_models:TwoStreams", f"--{flag}", str(tmp_path))
    assert f"[{flag}] {tmp_path} is a directory. Expected a file" in said
    assert f"[{flag}] There is no directory {tmp_path / 'no'}" in refusal(
        capsys, "llama", f"--{flag}", str(tmp_path / "no" / "file")
    )
