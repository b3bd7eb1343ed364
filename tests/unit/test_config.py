"""Switches are plain attributes that environment variables preset."""

import runpy
from typing import Any

import pytest

from torpor import config

FLAGS = {name: value for name, value in vars(config).items() if type(value) in (bool, int)}


def read(monkeypatch: pytest.MonkeyPatch, **presets: str) -> dict[str, Any]:
    """The switches as a process with these variables would find them."""
    for name in FLAGS:
        monkeypatch.delenv(f"TORPOR_{name.upper()}", raising=False)
    for name, text in presets.items():
        monkeypatch.setenv(f"TORPOR_{name.upper()}", text)
    return runpy.run_path(config.__file__)


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_can_be_preset(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    default = read(monkeypatch)[name]
    other = not default if type(default) is bool else default + 1
    found = read(monkeypatch, **{name: str(other)})[name]
    assert found == other
    assert type(found) is type(default)


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF", ""])
def test_these_words_switch_off(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, async_queue=text)["async_queue"] is False


@pytest.mark.parametrize("text", ["1", "true", "Yes", "on"])
def test_these_words_switch_on(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, strict=text)["strict"] is True


@pytest.mark.parametrize("text", ["ignore", "warn", "raise"])
def test_a_choice_can_be_preset(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, on_recompile=text)["on_recompile"] == text


def test_a_choice_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="ignore, warn, raise"):
        read(monkeypatch, on_recompile="sometimes")


def test_a_number_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="many"):
        read(monkeypatch, max_cached_plans="many")
