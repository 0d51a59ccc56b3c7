import json
import os
import signal
import subprocess
import sys
import time

import mlx.core as mx
import mlx.nn as nn
import pytest
from odd_models import InTurn, TwoStreams
from tiny import LLAMA, Tiny

from pptrain.cli import main
from pptrain.validate import Plan, Verdict
from pptrain.validate_run import _equal, _find, _parser
from pptrain.verdicts import line, to_html

QUICK = ["--quick", "--variants", "full"]


def one_layer():
    return TwoStreams(1)


class Slow(Tiny):
    """Is never done, once a file says that it runs."""

    def __call__(self, tokens):
        if "SLOW" in os.environ:
            with open(os.environ["SLOW"], "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(300)
        return super().__call__(tokens)


class WithoutLora(Tiny):
    """Fails with LoRA in its layers."""

    def __call__(self, tokens):
        if type(self.layers[0].linear) is not nn.Linear:
            raise TypeError("a layer has no nn.Linear")
        return super().__call__(tokens)


class InTurnLate(InTurn):
    """The third layer makes what is read behind the stack, so that cuts before it change no order of adding."""

    def __call__(self, tokens):
        hidden, side = self.embed(tokens), None
        for i, layer in enumerate(self.layers):
            hidden, made = layer(hidden, side)
            side = made if i >= 2 else None
        return self.head(self.norm((mx.cos(side) + hidden) * side))


class TwoLayers(TwoStreams):
    def __init__(self):
        super().__init__(2)


class Killed(Tiny):
    """Ends its process at its 14th forward, when one device has done and cuts are tried."""

    num_calls = 0

    def __call__(self, tokens):
        Killed.num_calls += 1
        if Killed.num_calls == 14:
            print("out of memory", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(tokens)


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


@pytest.mark.parametrize("text", ["0", "-3", "x"])
def test_jobs_are_at_least_one(capsys, text):
    assert f"[jobs] {text!r} was given" in refusal(capsys, "llama", f"--jobs={text}")


@pytest.mark.parametrize("options", [["--variants", "half"], ["--stagse", "2"]])
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


def test_a_file_that_cannot_be_written_is_refused_before_the_work(capsys, tmp_path):
    too_long = str(tmp_path / ("x" * 300))
    assert "is no model directory" in refusal(capsys, "x" * 300)
    assert f"[json] Cannot write {too_long}: " in refusal(capsys, "odd_models:TwoStreams", "--json", too_long)
    page = tmp_path / "page.html"
    page.write_text("as it was")
    options = ["--json", str(tmp_path / "a.json"), "--html", str(page)]
    assert "Cannot divide 4 layers into 9" in refusal(capsys, "odd_models:TwoStreams", "--stages", "9", *options)
    assert page.read_text() == "as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_one_file_for_two_kinds_is_refused(capsys, tmp_path):
    path = str(tmp_path / "out")
    assert "[json|html] Of " in refusal(capsys, "llama", "--json", path, "--html", path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is full")
def test_a_disk_that_is_full_is_told_and_the_other_files_are_written(capsys, tmp_path):
    page = tmp_path / "page.html"
    options = ["--stages", "2", "--json", "/dev/full", "--html", str(page)]
    assert main(["validate", "odd_models:TwoStreams", *QUICK, *options]) == 1
    said = capsys.readouterr()
    assert "[json] Cannot write /dev/full: No space left on device" in said.err
    assert " ok " in said.out
    assert "TwoStreams" in page.read_text()


@pytest.mark.parametrize(
    ("base", "kinds"),
    [
        ([], {"4 affine"}),
        (["--q-bits", "8"], {"8 affine"}),
        (["--q-mode", "mxfp4"], {"4 mxfp4"}),
        (["--quant-predicate", "mixed_3_6"], {"3 affine", "6 affine"}),
    ],
)
def test_the_base_that_is_asked_for_is_the_one_that_is_quantized(base, kinds):
    target = _find("llama", _parser().parse_args(["llama", *base]))
    model = target.build()
    target.quantize(model)
    assert {f"{module.bits} {module.mode}" for module in model.modules() if "scales" in module} == kinds


def test_the_base_goes_to_the_process_of_each_target(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    verdicts = tmp_path / "all.json"
    options = ["--quick", "--variants", "qlora", "--stages", "2", "--quant-predicate", "mixed_4_6"]
    assert main(["validate", "llama", "odd_models:TwoStreams", *options, "--json", str(verdicts)]) == 0
    llama, other = json.loads(verdicts.read_text())
    assert (llama["word"], llama["notes"]) == ("ok", [])
    assert "Model does not have expected keys for mixed quant" in other["reason"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--q-bits", "7"], "invalid choice: 7"),
        (["--q-mode", "fp4"], "invalid choice: 'fp4'"),
        (["--q-bits", "8", "--q-mode", "mxfp4"], "not allowed with argument --q-bits"),
        (
            ["--q-bits", "8", "--variants", "full,lora"],
            "[variants] --q-bits 8 is for qlora, which is not among full,lora",
        ),
    ],
)
def test_a_base_that_cannot_be_is_a_user_s_mistake(capsys, options, said):
    assert said in refusal(capsys, "llama", *options)


def test_another_base_than_the_config_says_is_a_user_s_mistake(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "quantization": {"group_size": 64, "bits": 4}}))
    said = refusal(capsys, str(path), "--q-bits", "8")
    assert f"--q-bits 8 cannot be followed by {path}, whose config says how it is quantized" in said


# -- what is said ------------------------------------------------------------------------------------------------------


def test_the_line_and_the_page_name_the_variants_that_were_not_tried(capsys, tmp_path):
    page = tmp_path / "page.html"
    assert main(["validate", f"{__name__}:WithoutLora", "--quick", "--stages", "2", "--html", str(page)]) == 0
    assert capsys.readouterr().out.endswith(" s  (not tried: lora, qlora)\n")
    assert "ok (not tried: lora, qlora)</td>" in page.read_text()


def test_numbers_of_stages_above_the_layers_are_named_as_not_tried(capsys):
    assert main(["validate", "odd_models:TwoStreams", *QUICK, "--stages", "2,5,6"]) == 0
    said = capsys.readouterr().out
    assert "3 cuts" in said
    assert said.endswith("(not tried: 5 stages, 6 stages)\n")


def test_what_was_not_tried_stands_before_the_reason_and_nothing_does_where_all_was():
    notes = ["full, layers 1+3: a gradient differs", "qlora was not tried: TypeError: no"]
    assert line(Verdict("a", "close", "layers 1+3", notes=notes)).endswith(" s  (not tried: qlora) layers 1+3")
    assert str(Verdict("b", "ok")) == line(Verdict("b", "ok"))
    assert "(not" not in to_html([Verdict("b", "ok", notes=["full, layers 1+3: lora was not tried: x"])])


def test_the_reason_of_a_close_model_ends_with_the_cuts_that_are_equal(capsys):
    assert main(["validate", f"{__name__}:InTurnLate", *QUICK]) == 1
    assert capsys.readouterr().out.endswith("the cut at layer 3; equal: 1+3, 2+2, 1+1+2\n")
    assert main(["validate", "odd_models:InTurn", *QUICK]) == 1
    assert "equal:" not in capsys.readouterr().out


def test_no_cut_is_called_equal_where_some_were_not_tried():
    plan = Plan(stages=(2,))
    assert _equal(Verdict("a", "close", num_cuts=3, unequal=["1+3"]), plan, 4) == ["2+2", "3+1"]
    assert _equal(Verdict("a", "close", num_cuts=2, unequal=["1+3"]), plan, 4) == []


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_process_that_is_killed_or_refuses_is_never_good(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    names = [f"{__name__}:Killed", f"{__name__}:TwoLayers"]
    assert main(["validate", *names, *QUICK, "--stages", "3", "--json", str(tmp_path / "all.json")]) == 1
    killed, refused = json.loads((tmp_path / "all.json").read_text())
    assert {killed["word"], refused["word"]} == {"cannot be cut here"}
    assert killed["reason"] == f"the process ended with signal {signal.SIGKILL:d}: out of memory"
    assert refused["reason"].startswith("PartitionError: ")
    assert "2 models: 2 cannot be cut here" in capsys.readouterr().out


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_tells_what_it_found_and_leaves_no_process(tmp_path, number):
    verdicts, slow = tmp_path / "all.json", tmp_path / "pids"
    slow.touch()
    names = ["odd_models:TwoStreams", f"{__name__}:Slow", "odd_models:TwoStreams"]
    options = ["--jobs", "1", *QUICK, "--stages", "2", "--json", str(verdicts)]
    program = (
        "import sys, pptrain.validate_run as run; run._find = lambda name, asked: None; "
        "from pptrain.cli import main; sys.exit(main(sys.argv[1:]))"
    )  # the class would sleep here, where it is only looked for
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SLOW": str(slow)}
    command = [sys.executable, "-c", program, "validate", *names, *options]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        while not slow.read_text():
            assert run.poll() is None
            time.sleep(0.1)
        run.send_signal(number)
        out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (130, "Interrupted.\n")
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        "odd_models:TwoStreams",
        "1 models: 1 ok; 2 not tried",
    ]
    assert [verdict["word"] for verdict in json.loads(verdicts.read_text())] == ["ok"]
    assert not any(is_running(int(pid)) for pid in slow.read_text().split())


def test_a_wrong_name_among_several_is_a_mistake_and_no_verdict(capsys):
    assert main(["validate", "llama", "no_such_model", *QUICK]) == 2
    said = capsys.readouterr()
    assert "'no_such_model' is no model directory" in said.err
    assert said.out == ""
