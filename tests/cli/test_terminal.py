"""Output does not depend on rich being there."""

import subprocess
import sys
from pathlib import Path

import pytest

from torpor.cli import terminal

ROWS = [("losses", "yes"), ("text", "no (3 of 400)")]


@pytest.fixture(params=["rich", "plain"])
def style(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(terminal, "HAVE_RICH", False)
    return request.param


def test_a_table_shows_every_cell(style, capsys):
    terminal.heading("how it went")
    terminal.table(("what", "answer"), ROWS)
    printed = capsys.readouterr().out
    for text in ("how it went", "what", "answer", "losses", "yes", "no (3 of 400)"):
        assert text in printed


def test_a_long_cell_is_not_cut(style, capsys):
    terminal.table(("what", "answer"), [("cause", "x" * 300)])
    assert "x" * 300 in capsys.readouterr().out


def test_a_cell_is_printed_as_it_is(style, capsys):
    terminal.table(("what", "answer"), [("size", "[4, 4] [bold]")])
    assert "[4, 4] [bold]" in capsys.readouterr().out


def test_a_plain_table_aligns_its_columns():
    columns = ("what", "answer", "ms", "to eager")
    rows = [("losses", "yes", "9.5", "±3%"), ("text", "no (3 of 400)", "1,250", "")]
    assert terminal.plain_table(columns, rows).splitlines() == [
        "what    answer            ms  to eager",
        "------  -------------  -----  --------",
        "losses  yes              9.5       ±3%",
        "text    no (3 of 400)  1,250",
    ]


def test_an_empty_table_has_its_header():
    assert terminal.plain_table(("what", "answer"), []).splitlines()[0] == "what  answer"


def test_progress_in_a_log_is_a_few_lines_on_stderr(style, capsys):
    with terminal.progress("lazy", 200) as advance:
        for i in range(200):
            advance(f"loss {i}")
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert [line.split("] ")[1] for line in lines] == [
        "50/200  loss 49",
        "100/200  loss 99",
        "150/200  loss 149",
        "200/200  loss 199",
    ]


def test_progress_on_a_terminal_redraws_one_line(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "HAVE_RICH", False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with terminal.progress("lazy", 3) as advance:
        for _ in range(3):
            advance("")
    printed = capsys.readouterr().err
    assert printed.count("\r") == 3
    assert printed.count("\n") == 1


def test_the_command_line_works_without_rich(tmp_path):
    (tmp_path / "rich.py").write_text("raise ImportError('rich is not installed')\n")
    source = Path(terminal.__file__).parents[2]
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(source)!r}]\n"
        "from torpor.cli import main, terminal\n"
        "assert not terminal.HAVE_RICH\n"
        "sys.exit(main(['info']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "backends" in done.stdout
