"""Backends by name: registered, found by entry point, chosen, refused with a hint."""

from typing import Any

import pytest

from torpor.backend import registry
from torpor.backend.data import BackendData
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.errors import BackendError, TorporWarning


class Idle(Backend):
    """Does nothing; remembers that it was initialised, and with which options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.ready = 0

    def initialize(self) -> None:
        self.ready += 1

    def compile(self, computations: Any) -> list[Computation]:
        return list(computations)

    def execute(self, *args: Any) -> list[BackendData]:
        return []


class Point:
    """An entry point, as an installed package would bring it."""

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.target = target

    def load(self) -> Any:
        if isinstance(self.target, Exception):
            raise self.target
        return self.target


@pytest.fixture(autouse=True)
def points(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    """A registry of its own for every test, and the entry points it finds."""
    found: list[Point] = []
    monkeypatch.setattr(registry, "_factories", {"idle": Idle})
    monkeypatch.setattr(registry, "_available", {})
    monkeypatch.setattr(registry, "_active", None)
    monkeypatch.setattr(registry, "_listeners", [])
    monkeypatch.setattr(registry, "entry_points", lambda group: list(found))
    return found


def test_a_backend_is_made_with_its_options_named_and_initialised_once() -> None:
    made = registry.make("idle", fast=True)
    assert isinstance(made, Idle)
    assert (made.name, made.options, made.ready) == ("idle", {"fast": True}, 1)


def test_an_unknown_backend_is_refused_with_a_suggestion() -> None:
    with pytest.raises(BackendError, match=r"no backend 'idel'.*did you mean 'idle'\?"):
        registry.make("idel")


def test_a_name_like_no_other_gets_the_list_alone() -> None:
    with pytest.raises(BackendError, match=r"there are idle$"):
        registry.make("zzz")


def test_a_factory_that_raises_is_named_and_its_error_kept() -> None:
    def broken() -> Backend:
        raise ImportError("no toolchain")

    registry.register("broken", broken)
    with pytest.raises(BackendError, match="'broken' could not be made: no toolchain") as caught:
        registry.make("broken")
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_backend_needs_a_name(name: Any) -> None:
    with pytest.raises(BackendError, match="needs a name"):
        registry.register(name, Idle)


def test_entry_points_are_found_and_loaded_when_asked_for(points: list[Point]) -> None:
    points.append(Point("acme", Idle))
    assert list(registry.backends()) == ["acme", "idle"]
    assert registry.make("acme", level=2).options == {"level": 2}  # type: ignore[attr-defined]


def test_an_entry_point_that_cannot_be_loaded_harms_nobody_else(points: list[Point]) -> None:
    points.append(Point("acme", ImportError("acme is broken")))
    assert registry.make("idle").name == "idle"
    with pytest.raises(BackendError, match="acme is broken"):
        registry.make("acme")


def test_what_the_process_registers_wins_over_an_entry_point(points: list[Point]) -> None:
    points.append(Point("idle", ImportError("never loaded")))
    assert isinstance(registry.make("idle"), Idle)


def test_the_environment_names_the_first_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORPOR_BACKEND", "idle")
    assert not registry.has_backend()
    first = registry.get_backend()
    assert registry.has_backend()
    assert first.name == "idle"
    assert registry.get_backend() is first


@pytest.fixture
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody said which backend to use; two of the names stand for idle ones."""
    monkeypatch.delenv("TORPOR_BACKEND", raising=False)
    registry.register(registry.PLAIN, Idle)


@pytest.mark.usefixtures("unnamed")
def test_a_compiler_is_the_default_where_it_can_be_used() -> None:
    registry.register(registry.PREFERRED, Idle, lambda: None)
    assert registry.get_backend().name == registry.PREFERRED


@pytest.mark.usefixtures("unnamed")
@pytest.mark.parametrize("reason", ["no compiler", ""])
def test_without_a_compiler_the_reference_is_the_default_and_says_why(reason: str) -> None:
    if reason:
        registry.register(registry.PREFERRED, Idle, lambda: reason)
    with pytest.warns(TorporWarning, match=reason or "not there"):
        assert registry.get_backend().name == registry.PLAIN


def test_listeners_hear_of_a_change_before_it_happens() -> None:
    heard: list[Any] = []
    registry.on_change(lambda old, new: heard.append((old, new, registry._active)))
    first = registry.use("idle")
    second = registry.use("idle")
    assert heard == [(None, first, None), (first, second, first)]


def test_a_backend_that_cannot_be_made_leaves_the_active_one() -> None:
    first = registry.use("idle")
    with pytest.raises(BackendError):
        registry.use("zzz")
    assert registry.get_backend() is first
