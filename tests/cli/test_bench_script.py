"""`torpor bench train.py`: a script of the user's, untouched, by every runner."""

import json

import pytest

from torpor.bench.script import step_ms
from torpor.bench.script_worker import Clock, Course, EnoughSteps
from torpor.cli import main

TRAINING = """
import sys
import torch
from torch import nn
import sizes

assert __name__ == "__main__"
model = nn.Sequential(nn.Linear(sizes.WIDTH, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.no_grad():
    for _ in range(50):
        model(torch.ones(1, sizes.WIDTH))
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(2, sizes.WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""
INFERENCE = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
with torch.no_grad():
    for _ in range(25):
        y = model(torch.ones(2, 4))
print(y.sum().item())
"""
FAILING = """
import torch
raise ValueError("the data are not there")
"""
LEAVING = "import sys; sys.exit(3)"
DYING = """
import os, sys
print("out of ideas", file=sys.stderr, flush=True)
os._exit(7)
"""
USING_TORPOR = """
import torch, torpor
x = torpor.lazy(torch.ones(3))
assert (x + 1).tolist() == [2.0] * 3
"""


@pytest.fixture
def bench(tmp_path, capfd):
    """Runs the command on a script; gives its status, its numbers and what was shown."""

    def run(source, *options, arguments=(), runners="eager,torpor"):
        (tmp_path / "sizes.py").write_text("WIDTH = 8")
        (tmp_path / "script.py").write_text(source)
        numbers = tmp_path / "numbers.json"
        command = ["bench", "--device", "cpu", "--threads", "1", "--json", str(numbers)]
        command += ["--runners", runners, "--backends", "reference", "--keep-caches", *options]
        status = main([*command, str(tmp_path / "script.py"), *arguments])
        return status, json.loads(numbers.read_text())["runners"], capfd.readouterr()

    return run


def test_a_training_script_is_timed_by_its_optimizer(bench):
    status, courses, shown = bench(TRAINING, arguments=["23"])
    assert status == 0
    for course in courses.values():
        assert (course["kind"], course["steps"], course["error"]) == ("training", 23, "")
        assert len(course["group_ms"]) == 5  # to the 5th, 10th, 15th, 20th and 23rd
        assert 0 < course["first_s"] <= course["total_s"]
        assert course["step_ms"] > 0
    assert "trained" not in shown.out + shown.err
    assert "step ms" in shown.out


def test_an_inference_script_is_timed_by_its_module_calls(bench):
    status, courses, _ = bench(INFERENCE)
    assert status == 0
    assert {course["kind"] for course in courses.values()} == {"inference"}
    assert [course["steps"] for course in courses.values()] == [25, 25]


def test_a_script_is_stopped_after_so_many_steps(bench):
    _, courses, shown = bench(TRAINING, "--steps", "7", arguments=["1000000"], runners="eager")
    assert courses["eager"]["steps"] == 7
    assert "fewer than 20 steps" in shown.out


def test_output_is_shown_when_asked_for(bench):
    _, _, shown = bench(TRAINING, "--verbose", arguments=["1"], runners="eager")
    assert "trained" in shown.err


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (FAILING, "ValueError: the data are not there"),
        (LEAVING, "ended with status 3"),
        (DYING, "out of ideas"),
    ],
)
def test_a_script_that_fails_is_reported(bench, source, said):
    status, courses, shown = bench(source, runners="eager")
    assert status == 1
    assert courses["eager"]["error"] == said
    assert said in shown.out


def test_a_script_that_takes_too_long_is_reported(bench):
    _, courses, _ = bench("import time; time.sleep(60)", "--timeout", "1", runners="eager")
    assert courses["eager"]["error"] == "not done within 1 s"


def test_a_script_without_steps_says_so(bench):
    status, _, shown = bench("print('nothing')", runners="eager")
    assert status == 0
    assert "no step: no optimizer stepped" in shown.out


def test_a_script_that_uses_torpor_itself_gets_all_of_it(bench):
    status, courses, _ = bench(USING_TORPOR, runners="eager")
    assert (status, courses["eager"]["error"]) == (0, "")


@pytest.mark.slow
def test_a_script_is_compiled_where_its_modules_are_called(bench):
    status, courses, _ = bench(TRAINING, arguments=["12"], runners="compile")
    assert (status, courses["compile"]["steps"]) == (0, 12)


def test_a_runner_that_runs_no_scripts_is_refused(tmp_path, capsys):
    (tmp_path / "script.py").write_text("")
    assert main(["bench", "--runners", "torch-lazy", str(tmp_path / "script.py")]) == 2
    assert "a script is run by eager, compile, torpor, not by torch-lazy" in capsys.readouterr().err


def test_the_clock_waits_at_the_first_step_and_at_every_fifth():
    waited = []
    clock = Clock(lambda: waited.append(clock.steps), most_steps=12)
    with pytest.raises(EnoughSteps):
        for _ in range(20):
            clock.step()
    assert waited == [1, 5, 10, 12]
    assert [steps for steps, _ in clock.ends] == [1, 5, 10, 12]
    assert len(clock.groups()) == 3


def test_no_handler_of_a_script_keeps_it_from_ending():
    assert not issubclass(EnoughSteps, Exception)


@pytest.mark.parametrize(
    ("groups", "expected"), [([], None), ([3.0], 3.0), ([90.0, 2.0], 2.0), ([9.0, 8.0, 1.0], 1.0)]
)
def test_the_step_is_of_the_later_half(groups, expected):
    assert step_ms(Course(group_ms=groups)) == expected
