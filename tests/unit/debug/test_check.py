"""`torpor.check` compares every graph with the reference while the program runs."""

import pytest
import torch

import torpor
from tests.unit.debug.steps import training_step
from torpor.backend.registry import register
from torpor.errors import DifferenceError, TorporWarning
from torpor.observe.watch import WATCHERS
from torpor.testing.networks import NETWORKS


@pytest.fixture(autouse=True)
def planted_backends():
    from tests.unit.debug import planted

    for kind in (planted.Planted, planted.Sound, planted.WrongWhenFused, planted.WrongInOneBit):
        register(kind.__name__.lower(), kind)


@pytest.mark.parametrize("backend", ["planted", "wronginonebit", "wrongwhenfused"])
def test_a_wrong_node_is_an_error_with_its_line(backend):
    step = training_step(3)
    with pytest.raises(DifferenceError) as caught, torpor.check(backend):
        step().item()
    for part in ("aten.tanh.default", "# the marked line", f"{backend} differs from reference"):
        assert part in str(caught.value)
    assert WATCHERS == []
    assert torpor.backend.get_backend().name == "reference"


def test_an_error_that_nobody_reads_is_told_at_the_end():
    x = torch.randn(13, 7).to("lazy")
    with pytest.raises(DifferenceError), torpor.check("planted"):
        y = torch.tanh(x)  # noqa: F841  # alive, and never read


def test_a_warning_and_the_program_goes_on():
    step = training_step(2)
    check = torpor.check("planted", on_difference="warn")

    def steps():
        with check:
            for _ in range(3):
                step().item()

    with pytest.warns(TorporWarning, match="first at node") as reported:
        steps()
    assert len(check.faults) == len(reported)
    assert {fault.op for fault in check.faults} == {"aten.tanh.default"}
    assert check.graphs >= 3


@pytest.mark.parametrize("backend", ["sound", "torchscript"])
def test_a_sound_backend_passes(backend):
    step = training_step(2)
    with torpor.check(backend) as check:
        for _ in range(2):
            step().item()
    assert check.faults == []
    assert check.graphs >= 2


@pytest.mark.parametrize("name", ["perceptron_adamw", "convolution_batch_norm"])
def test_inductor_passes(name):
    network = NETWORKS[name]
    torch.manual_seed(0)
    model = network.build().to("lazy")
    optimizer = network.optimizer(list(model.parameters()))
    with torpor.check("inductor") as check:
        for i in range(2):
            x, y = network.batch(i)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x.to("lazy")), y.to("lazy")).backward()
            optimizer.step()
    assert check.faults == []
    assert (check.graphs, check.left_out) == (2, 0)


def test_the_active_backend_unless_another_is_named():
    torpor.use("planted")
    before = torpor.backend.get_backend()
    x = torch.randn(13, 7).to("lazy")
    with pytest.raises(DifferenceError), torpor.check():
        torch.tanh(x).tolist()
    assert torpor.backend.get_backend() is before


def test_a_backend_is_checked_from_its_first_run_on(monkeypatch):
    monkeypatch.setattr(torpor.config, "compile_after", 5)
    x = torch.randn(13, 7).to("lazy")
    with pytest.raises(DifferenceError), torpor.check("planted"):
        torch.tanh(x).tolist()
    assert torpor.config.compile_after == 5


def test_a_fault_that_comes_and_goes_is_told():
    from tests.unit.debug import planted

    class Sometimes(planted.Planted):
        runs = 0

        def execute(self, computation, arguments, device):
            Sometimes.runs += 1
            return super().execute(computation, arguments, device)

        def is_wrong(self, node, outputs):
            return super().is_wrong(node, outputs) and Sometimes.runs == 1

    register("sometimes", Sometimes)
    x = torch.randn(13, 7).to("lazy")
    with pytest.raises(DifferenceError, match="in the whole graph"), torpor.check("sometimes"):
        torch.tanh(x).tolist()


def test_an_error_of_the_program_stays_what_it_is():
    table = torch.randn(4, 2).to("lazy")
    with pytest.raises(IndexError), torpor.check("sound"):
        torch.embedding(table, torch.tensor([9]).to("lazy")).tolist()
    assert WATCHERS == []


def test_an_error_of_the_body_is_told_and_the_backend_is_set_back():
    x = torch.randn(13, 7).to("lazy")
    with pytest.raises(ZeroDivisionError), torpor.check("planted"):
        y = torch.tanh(x)  # noqa: F841  # wrong, and pending when the body ends
        raise ZeroDivisionError
    assert torpor.backend.get_backend().name == "reference"
    assert WATCHERS == []
    assert (torch.ones(2).to("lazy") + 1).tolist() == [2.0, 2.0]


def test_options_are_for_the_backend():
    with torpor.check("inductor", max_nodes=7):
        assert torpor.backend.get_backend().max_nodes == 7
        assert torpor.backend.get_backend().options == {"max_nodes": 7}


def test_graphs_with_random_numbers_are_left_alone():
    from tests.unit.debug import planted

    class Draws(planted.Planted):
        draws = True

    register("planted_draws", Draws)
    x = torch.zeros(13, 7).to("lazy")
    with torpor.check("planted_draws") as check:
        torch.tanh(torch.rand_like(x)).tolist()
    assert (check.graphs, check.left_out) == (0, 1)


def test_what_to_do_is_one_of_two_things():
    with pytest.raises(ValueError, match="'raise' or 'warn'"):
        torpor.check("sound", on_difference="ignore")
