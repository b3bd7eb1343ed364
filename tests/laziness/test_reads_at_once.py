"""Reads of graphs that were met before, which the thread that reads runs by itself."""

import threading

import pytest
import torch

import torpor
from tests.comparison import Put
from tests.instrumented_ops import gated, open_gate
from torpor.execute.queue import DeviceQueue

X = torch.arange(6.0).view(2, 3)


def read_often(x: torch.Tensor) -> float:
    return [(x * 2).sum().item() for _ in range(10)][-1]


def forbid_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: DeviceQueue, job: object) -> None:
        raise AssertionError("a job was made")

    monkeypatch.setattr(DeviceQueue, "enqueue", refuse)


def test_a_read_that_comes_back_makes_no_job(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    x = put(X)
    read_often(x)
    forbid_jobs(monkeypatch)
    assert read_often(x) == (X * 2).sum().item()


def test_what_else_is_in_the_cone_is_computed_once(put: Put) -> None:
    x = put(X)
    for _ in range(10):
        part = x * 2
        rest = part + 1
        assert part.sum().item() == 30.0
        assert not torpor.is_pending(part)
        assert torpor.is_pending(rest)
        assert rest.tolist() == (X * 2 + 1).tolist()
        torpor.sync()


def test_a_read_waits_for_what_is_on_the_queue(put: Put) -> None:
    x = put(X)
    read_often(x)
    y = gated(x)
    torpor.sync()
    opened = threading.Timer(0.2, open_gate)
    opened.start()
    assert (y + 1).sum().item() == 21.0
    assert read_often(x) == 30.0
    opened.join()


def test_threads_that_read_at_the_same_time_get_their_own_numbers(put: Put) -> None:
    tensors = [put(X + number) for number in range(4)]
    wrong: list[object] = []

    def read(number: int) -> None:
        for _ in range(30):
            found = (tensors[number] * 2).sum().item()
            if found != ((X + number) * 2).sum().item():
                wrong.append((number, found))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_read_that_fails_raises_what_eager_does_every_time(put: Put) -> None:
    x = put(torch.eye(2))
    for _ in range(10):
        assert torch.linalg.cholesky(x).sum().item() == 2.0
    bad = put(-torch.eye(2))
    for _ in range(10):
        with pytest.raises(torch.linalg.LinAlgError):
            torch.linalg.cholesky(bad).sum().item()


def test_an_interrupt_in_the_middle_of_a_read_leaves_it_to_be_read_again(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = put(X)
    read_often(x)
    backend = torpor.backend.get_backend()
    execute = type(backend).execute

    def interrupt(*args: object) -> object:
        monkeypatch.setattr(type(backend), "execute", execute)
        raise KeyboardInterrupt

    y = (x * 2).sum()
    monkeypatch.setattr(type(backend), "execute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        y.item()
    assert y.item() == 30.0
    torpor.wait()
    assert read_often(x) == 30.0
