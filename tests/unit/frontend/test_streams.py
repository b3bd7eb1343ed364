"""`torch.lazy` has streams and events: the program's order, and a way to wait for it."""

import pytest
import torch

import torpor


def _pending() -> torch.Tensor:
    return torch.ones(2, device="lazy") + 1


def test_a_body_in_another_stream_is_recorded_in_order() -> None:
    made = _pending()
    other = torch.lazy.Stream(priority=-1)
    other.wait_stream(torch.lazy.current_stream())
    with torch.lazy.stream(other):
        made = made * 3
    torch.lazy.current_stream().wait_event(other.record_event())
    assert torpor.is_pending(made)
    assert made.tolist() == [6.0, 6.0]


@pytest.mark.parametrize("kind", [torch.lazy.Stream, torch.lazy.Event])
def test_whoever_synchronizes_waits_for_all_that_was_recorded(kind: type) -> None:
    made = _pending()
    kind().synchronize()
    assert not torpor.is_pending(made)


@pytest.mark.parametrize("kind", [torch.lazy.Stream, torch.lazy.Event])
def test_a_loop_that_asks_ends(kind: type) -> None:
    made = _pending()
    while not kind().query():
        pass
    assert not torpor.is_pending(made)
