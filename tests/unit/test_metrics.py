"""Counters, timers and gauges: exact, bounded, and cheap where ops count themselves."""

import json
import re
import threading
from collections import Counter

import pytest

from torpor import metrics


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of its own for every test; what the process counts goes on counting elsewhere."""
    for name, empty in (("_counts", Counter()), ("_cells", {}), ("_new_nodes", Counter()),
                        ("_timers", {}), ("_lines", {}), ("_gauges", {}), ("_on_reset", []),
                        ("_reports", [])):  # fmt: skip
        monkeypatch.setattr(metrics, name, empty)


def test_counters_leave_out_what_is_zero() -> None:
    metrics.count("Met", 2)
    metrics.count("Nothing", 0)
    assert metrics.counters() == {"Met": 2, "OpsRecorded": 0}


def test_overloads_count_under_one_name() -> None:
    metrics.op_cell("lazy::add", "aten.add.Tensor")[0] += 2
    metrics.op_cell("lazy::add", "aten.add.Scalar")[0] += 1
    assert metrics.counters() == {"lazy::add": 3, "OpsRecorded": 3}
    assert metrics.recorded()["lazy::add", "aten.add.Tensor"] == 2


def test_a_cell_is_the_same_list_after_a_reset() -> None:
    cell = metrics.op_cell("lazy::mul")
    cell[0] += 1
    metrics.reset()
    assert metrics.counters() == {"OpsRecorded": 0}
    cell[0] += 1
    assert metrics.counters()["lazy::mul"] == 1
    assert metrics.op_cell("lazy::mul") is cell


def test_count_is_exact_from_many_threads() -> None:
    def work() -> None:
        for _ in range(1000):
            metrics.count("Met")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.counters()["Met"] == 4000


def test_count_line_counts_under_the_line_too() -> None:
    for line in ("a.py:1", "a.py:1", "b.py:2"):
        metrics.count_line("Sync::item", line)
    assert metrics.counters()["Sync::item"] == 3
    assert metrics.lines("Sync::item") == {"a.py:1": 2, "b.py:2": 1}
    assert metrics.lines("never met") == {}


def test_new_nodes_count_by_op() -> None:
    metrics.count_node("aten.add.Tensor")
    assert metrics.new_nodes() == {"aten.add.Tensor": 1}


def test_a_timer_counts_a_body_that_raises() -> None:
    with pytest.raises(KeyError), metrics.timer("Work"):
        raise KeyError
    assert metrics.timers()["Work"]["count"] == 1


def test_percentiles_are_samples_in_order() -> None:
    for number in range(100, -1, -1):
        metrics.add_time("Work", float(number))
    summary = metrics.timers()["Work"]
    assert (summary["p50"], summary["p90"], summary["p99"]) == (50, 90, 99)
    assert (summary["count"], summary["total"]) == (101, 5050)


def test_percentiles_of_few_samples_reach_the_largest() -> None:
    metrics.add_time("Work", 1.0)
    metrics.add_time("Work", 2.0)
    summary = metrics.timers()["Work"]
    assert (summary["p50"], summary["p90"], summary["p99"]) == (1, 2, 2)


def test_a_timer_keeps_the_latest_samples_and_counts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_SAMPLES", 8)
    for number in range(100):
        metrics.add_time("Work", float(number))
    summary = metrics.timers()["Work"]
    assert (summary["count"], summary["total"]) == (100, 4950)
    assert summary["p50"] == 95
    assert len(metrics._timers["Work"].samples) == 8


def test_lines_have_times_too() -> None:
    metrics.time_line("Wait", "a.py:1", 0.5)
    metrics.time_line("Wait", "a.py:1", 0.25)
    assert metrics.lines("Wait") == {"a.py:1": 2}
    assert metrics.line_seconds("Wait") == {"a.py:1": 0.75}
    assert metrics.line_seconds("never met") == {}
    assert metrics.line_names() == ["Wait"]


def test_a_program_with_endless_lines_is_counted_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "MAX_LINES", 3)
    for number in range(10):
        metrics.count_line("Sync::item", f"a.py:{number}")
    metrics.count_line("Sync::item", "a.py:1")
    counted = metrics.lines("Sync::item")
    assert counted == {"a.py:0": 1, "a.py:1": 2, "a.py:2": 1, metrics.OTHER_LINES: 7}


def test_a_gauge_is_asked_when_somebody_wants_to_know() -> None:
    level = [1]
    metrics.add_gauge("Level", lambda: level[0])
    level[0] = 7
    assert metrics.gauges() == {"Level": 7}
    assert "Level" in metrics.report()


def test_who_is_told_of_a_reset_forgets_too() -> None:
    reported = []
    metrics.on_reset(lambda: reported.append(True))
    metrics.reset()
    assert reported == [True]


def test_report_has_a_line_for_each_counter_and_timer() -> None:
    metrics.count("Met", 1234)
    with metrics.timer("Work"):
        pass
    met, ops, work = metrics.report().splitlines()
    assert met.split() == ["Met", "1,234"]
    assert ops.split() == ["OpsRecorded", "0"]
    assert work.split()[:3] == ["Work", "1", "total"]


def test_reset_forgets_everything() -> None:
    metrics.count_line("Met", "a.py:1")
    metrics.count_node("aten.add.Tensor")
    with metrics.timer("Work"):
        pass
    metrics.reset()
    assert metrics.counters() == {"OpsRecorded": 0}
    assert (metrics.timers(), metrics.lines("Met"), metrics.new_nodes()) == ({}, {}, {})


# -- reports -----------------------------------------------------------------------------------


def fill() -> None:
    metrics.count("UncachedCompile", 3)
    metrics.op_cell("lazy::add")[0] += 5
    metrics.add_time("Compile", 0.25)
    metrics.add_time("Compile", 0.75)
    metrics.count_line("Sync::item", 'a\\b.py:1   x = "quoted"')
    metrics.time_line("Wait", "two\nlines", 1.5)
    metrics.add_gauge("PendingBytes", lambda: 4096)


def test_the_text_shows_percentiles_and_lines() -> None:
    fill()
    rows = {row.split()[0]: row for row in metrics.report().splitlines()}
    assert "p50" in rows["Compile"]
    assert "p90" in rows["Compile"]
    assert "p99   750000.0 us" in rows["Compile"]
    assert rows["PendingBytes"].split()[1] == "4,096"
    assert "x =" in rows["Sync::item"]
    assert "1500.00 ms" in rows["Wait"]


def test_the_json_holds_everything() -> None:
    fill()
    content = json.loads(metrics.report("json"))
    assert content["counters"]["UncachedCompile"] == 3
    assert content["timers"]["Compile"]["p90"] == 0.75
    assert content["gauges"] == {"PendingBytes": 4096}
    assert content["lines"]["Wait"] == {"two\nlines": {"count": 1, "seconds": 1.5}}


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'json'"):
        metrics.report("yaml")


SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([-+\w.]+)")
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\[\\"n])*)"(?:,|$)')
UNESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def parse(text: str) -> tuple[dict[str, str], dict[tuple[str, tuple[tuple[str, str], ...]], float]]:
    """Types and samples of a text in Prometheus' format; raises where it is none."""
    assert text.endswith("\n")
    types: dict[str, str] = {}
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    helped: set[str] = set()
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            helped.add(line.split(" ", 3)[2])
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types, f"{name} has two types"
            assert name in helped
            types[name] = kind
        else:
            name, labels, value = SAMPLE.fullmatch(line).groups()
            base = re.sub(r"_(sum|count)$", "", name)
            assert (name if name in types else base) in types, f"{name} has no type"
            key = name, tuple(_labels(labels or ""))
            assert key not in samples, f"{key} stands there twice"
            samples[key] = float(value)
    return types, samples


def _labels(text: str) -> list[tuple[str, str]]:
    found = LABEL.findall(text)
    assert "".join(f'{key}="{value}",' for key, value in found).rstrip(",") == text.rstrip(",")
    return [
        (key, re.sub(r'\\[\\"n]', lambda escape: UNESCAPED[escape.group()], value))
        for key, value in found
    ]


def test_the_prometheus_text_can_be_parsed() -> None:
    fill()
    types, samples = parse(metrics.report("prometheus"))
    assert types["torpor_uncached_compile_total"] == "counter"
    assert samples["torpor_uncached_compile_total", ()] == 3
    assert types["torpor_pending_bytes"] == "gauge"
    assert types["torpor_compile_seconds"] == "summary"
    assert samples["torpor_compile_seconds", (("quantile", "0.9"),)] == 0.75
    assert samples["torpor_compile_seconds_sum", ()] == 1
    assert samples["torpor_compile_seconds_count", ()] == 2
    assert samples["torpor_ops_total", (("name", "lazy::add"),)] == 5
    line = (("name", "Sync::item"), ("line", 'a\\b.py:1   x = "quoted"'))
    assert samples["torpor_lines_total", line] == 1
    wait = (("name", "Wait"), ("line", "two\nlines"))
    assert samples["torpor_lines_seconds_total", wait] == 1.5


def test_an_empty_report_is_prometheus_text_too() -> None:
    types, samples = parse(metrics.report("prometheus"))
    assert samples == {("torpor_ops_recorded_total", ()): 0}
    assert "torpor_ops_total" in types
