"""``torpor view``: a page of a file or of a running program, and one file to send."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import torpor
from torpor.cli import main

PROGRAM = """
import sys, torch, torpor
x = torch.ones(3).to("lazy")
for _ in range(3):
    (x * 2).sum().item()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path):
    torpor.use("reference")
    x = torch.ones(13, 7).to("lazy")
    with torpor.record(tmp_path / "step.torpor"):
        torch.tanh(x * 2).tolist()
        (x + 1).sum().item()
    return tmp_path / "step.torpor"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where programs leave their addresses."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"torpor-view-{os.getuid()}"


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["view", "--help"])
    shown = capsys.readouterr().out
    for option in ("FILE", "--html", "--port", "--no-browser", "--allow", "--json"):
        assert option in shown


def test_json_is_what_the_page_shows_first(file, capsys):
    assert main(["view", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["format"] == "torpor view"
    assert [graph["nodes"] for graph in facts["graphs"]] == [2, 2]
    assert facts["versions"]["torch"] == torch.__version__


class Parts(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], False

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data

    def handle_endtag(self, tag):
        self.inside = False


def test_html_is_one_file_that_asks_for_nothing(file, tmp_path, capsys):
    out = tmp_path / "step.html"
    assert main(["view", str(file), "--html", str(out)]) == 0
    assert "step.html" in capsys.readouterr().err
    page = Parts()
    page.feed(out.read_text(encoding="utf-8"))
    sources = [a for _, attributes in page.tags for a in attributes if a in ("src", "href")]
    addresses = [attributes.get("href") for tag, attributes in page.tags if "href" in attributes]
    assert sources == ["href", "href"]
    assert addresses == ["data:,", "#panels"]
    data = json.loads(page.scripts[0])
    assert [graph["number"] for graph in data["graphs"]] == [0, 1]
    assert data["differences"][0][:2] == [0, 1]
    (policy,) = [a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize(
    ("contents", "what"),
    [(None, "No such file"), (b"", "not a torpor record"), (b"torpor record 1\n", "cut off")],
)
def test_a_bad_file_is_told(tmp_path, capsys, contents, what):
    path = tmp_path / "bad"
    if contents is not None:
        path.write_bytes(contents)
    assert main(["view", str(path), "--no-browser"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("torpor view: ")
    assert what in shown
    assert str(path) in shown


def test_without_a_program_it_says_what_to_do(folder, capsys):
    assert main(["view", "--no-browser"]) == 2
    assert "TORPOR_VIEW=1" in capsys.readouterr().err
    assert main(["view", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_html_needs_a_file(folder, capsys, tmp_path):
    assert main(["view", "--html", str(tmp_path / "x.html")]) == 2
    assert "FILE" in capsys.readouterr().err


def test_a_port_that_cannot_be_is_told(file, capsys):
    assert main(["view", str(file), "--port", "70000", "--no-browser"]) == 2
    assert "torpor view:" in capsys.readouterr().err


def interruptible():
    """A background job, and all that it starts, ignores interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_file_is_served_until_it_is_interrupted(file):
    command = [sys.executable, "-m", "torpor", "view", str(file), "--no-browser"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=interruptible
    ) as process:
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{address}summary.json", timeout=30) as answer:
            assert json.load(answer)["live"] is False
        process.send_signal(2)
        assert process.wait(30) == 130


def running(folder, **environment):
    """A program that is looked at; its address."""
    given = {**os.environ, "TORPOR_VIEW": "1", "XDG_RUNTIME_DIR": str(folder.parent), **environment}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=given,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = process.stderr.readline()
    assert process.stdout.readline() == "ready\n"
    return process, re.fullmatch(r"torpor view: (http://127\.0\.0\.1:\d+/\S+/)\n", line)[1]


def test_a_program_is_looked_at_while_it_runs(folder, capsys):
    process, address = running(folder)
    try:
        with urllib.request.urlopen(f"{address}summary.json", timeout=30) as answer:
            summary = json.load(answer)
        assert summary["live"] is True
        assert summary["graphs"][0]["hits"] == 2
        assert main(["view", "--no-browser"]) == 0
        assert address in capsys.readouterr().out
        (kept,) = folder.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert kept.stat().st_mode & 0o777 == 0o600
    finally:
        process.communicate("")
    assert process.returncode == 0
    assert list(folder.iterdir()) == []


def test_the_port_can_be_chosen_and_may_be_taken(folder):
    first, address = running(folder)
    try:
        port = re.search(r":(\d+)/", address)[1]
        second, other = running(folder, TORPOR_VIEW_PORT=port)
        second.communicate("")
        assert f":{port}/" not in other
    finally:
        first.communicate("")
    third, again = running(folder, TORPOR_VIEW_PORT=port)
    third.communicate("")
    assert f":{port}/" in again


def test_a_port_that_cannot_be_does_not_stop_a_program(folder):
    process, address = running(folder, TORPOR_VIEW_PORT="70000")
    process.communicate("")
    assert ":70000" not in address
    assert process.returncode == 0


def test_a_program_that_died_is_forgotten(folder, capsys):
    process, _ = running(folder)
    process.kill()
    process.communicate()
    assert len(list(folder.iterdir())) == 1
    assert main(["view", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert list(folder.iterdir()) == []


def test_a_folder_of_others_is_not_believed(folder, capsys):
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    entry = {"pid": os.getpid(), "program": "x", "address": "http://127.0.0.1:1/x/"}
    (folder / "1.json").write_text(json.dumps(entry))
    assert main(["view", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_nothing_of_it_is_loaded_unless_it_is_asked_for():
    code = "import torpor, sys; print([m for m in sys.modules if m.startswith('torpor.debug')])"
    given = {name: text for name, text in os.environ.items() if name != "TORPOR_VIEW"}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "[]\n"


def test_processes_that_a_program_starts_have_no_page(folder):
    code = (
        "import multiprocessing as m\n"
        "def work(): import torpor\n"
        "if __name__ == '__main__':\n"
        "    import torpor\n"
        "    p = m.get_context('spawn').Process(target=work); p.start(); p.join()\n"
    )
    script = folder.parent / "program.py"
    script.write_text(code)
    given = {**os.environ, "TORPOR_VIEW": "1", "PYTHONPATH": str(Path("src").resolve())}
    shown = subprocess.run(
        [sys.executable, str(script)], env=given, capture_output=True, text=True, check=True
    )
    assert shown.stderr.count("torpor view:") == 1


def test_looking_does_not_stop_a_program_that_ends(folder):
    process, address = running(folder)
    with urllib.request.urlopen(address, timeout=30):
        start = time.monotonic()
        process.communicate("")
        assert time.monotonic() - start < 30
    assert process.returncode == 0
