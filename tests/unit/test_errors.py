"""The errors of torpor, and what `annotate` adds to eager's."""

import pytest

from torpor import errors
from torpor.errors import annotate

OWN = [errors.GraphError, errors.BackendError, errors.CompileError, errors.UnsupportedError,
       errors.RegistrationError, errors.StepError]  # fmt: skip


@pytest.mark.parametrize("error", OWN)
def test_every_own_error_is_a_torpor_error_and_a_runtime_error(error: type) -> None:
    assert issubclass(error, errors.TorporError)
    assert issubclass(error, RuntimeError)


@pytest.mark.parametrize("error", OWN)
def test_the_page_of_errors_lists_every_error(error: type) -> None:
    assert error.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", [IndexError, KeyError, RuntimeError, NotImplementedError])
def test_annotate_keeps_the_very_exception_and_its_type(kind: type[Exception]) -> None:
    error = kind("out of range")
    assert annotate(error, "aten.select.int", "train.py:3   x[9]") is error
    assert type(error) is kind
    assert error.args[0] == "[aten.select.int] out of range\n  recorded at: train.py:3   x[9]"


def test_annotate_a_second_time_changes_nothing() -> None:
    error = annotate(ValueError("no"), "aten.a", "a.py:1", "%1 = aten.a()")
    before = error.args
    assert annotate(error, "aten.b", "b.py:2", "%2 = aten.b()") is error
    assert error.args == before


def test_annotate_says_the_line_of_the_graph() -> None:
    error = annotate(RuntimeError("no"), "aten.neg.default", None, "%1 = aten.neg(%0)")
    assert str(error) == "[aten.neg.default] no\n  in graph:    %1 = aten.neg(%0)"


def test_an_error_without_a_message_is_told_by_its_type() -> None:
    assert str(annotate(MemoryError(), "aten.mm.default")) == "[aten.mm.default] MemoryError"


def test_further_arguments_of_an_error_stay() -> None:
    assert annotate(RuntimeError("no", 7), "aten.a").args == ("[aten.a] no", 7)
