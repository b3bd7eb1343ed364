"""Plots measurements as PNG files; needs matplotlib."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from torpor.bench.growth import Growth
from torpor.bench.measurements import Results, WorkloadOutcome, machine
from torpor.bench.wild.outcome import Wild

COLOURS = {
    "eager": "#9a9a9a",
    "compile": "#4c78a8",
    "compile-reduce-overhead": "#9ecae9",
    "torch-lazy": "#e8a33d",
    "torpor": "#b5304b",
    "torpor-capture": "#8f1d3f",
    "torpor-lazy": "#dd7f8f",
    "torpor-compile": "#6d3a7c",
}
OTHERS = ("#2a9d8f", "#76b7b2", "#8c6d31", "#bcbd22", "#17becf")  # torpor on other backends
CUT_AT = 3.0  # times eager: longer bars are truncated and labelled


class NoPicture(RuntimeError):
    """Why nothing can be plotted."""


def _pyplot() -> Any:
    try:
        import_module("matplotlib").use("Agg")
        return import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        hint = "pip install 'torpor[bench]'"
        raise NoPicture(f"no picture: matplotlib is not installed ({hint})") from error


def check() -> None:
    """Raise before hours of measuring, not after, if plotting is impossible."""
    _pyplot()


def race(results: Results, path: Path) -> None:
    """Bars grouped by workload, one per runner, as multiples of eager."""
    pyplot = _pyplot()
    shown = [outcome for outcome in results.outcomes if _has_bars(outcome)]
    if not shown:
        raise NoPicture("no picture: no runner could be compared with eager")
    runners = list(dict.fromkeys(row.runner for outcome in shown for row in outcome.rows))
    height = 0.9 + 0.26 * sum(len(_bars(outcome)) + 1.2 for outcome in shown)
    figure, axes = pyplot.subplots(figsize=(9, height), layout="constrained")
    _draw_bars(axes, shown, _colours(runners))
    _finish(axes)
    figure.suptitle(f"Time of a step: {machine(results.device)}", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _has_bars(outcome: WorkloadOutcome) -> bool:
    return bool(_bars(outcome))


def _bars(outcome: WorkloadOutcome) -> list[tuple[str, float, float]]:
    """Runner, ratio to eager, milliseconds."""
    found = ((row.runner, outcome.ratio(row, "eager"), row.ms) for row in outcome.rows)
    return [(runner, ratio, ms) for runner, ratio, ms in found if ratio is not None and ms]


def _colours(runners: list[str]) -> dict[str, str]:
    rest = iter(OTHERS * len(runners))
    return {runner: COLOURS.get(runner) or next(rest) for runner in runners}


def _draw_bars(axes: Any, outcomes: list[WorkloadOutcome], colours: dict[str, str]) -> None:
    place = 0.0
    labels: list[tuple[float, str]] = []
    for outcome in outcomes:
        bars = _bars(outcome)
        labels.append((place + (len(bars) - 1) / 2, _two_lines(outcome)))
        for runner, ratio, ms in bars:
            axes.barh(place, min(ratio, CUT_AT), height=0.86, color=colours[runner])
            _label_bar(axes, place, runner, ratio, ms)
            place += 1
        place += 1.2
    axes.set_yticks([at for at, _ in labels], [text for _, text in labels])


def _two_lines(outcome: WorkloadOutcome) -> str:
    name, _, rest = outcome.title.partition(", ")
    return f"{name}\n{rest}" if rest else name


def _label_bar(axes: Any, place: float, runner: str, ratio: float, ms: float) -> None:
    time = f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"
    far = f" ({ratio:,.0f} ×)" if ratio > CUT_AT else ""
    axes.text(
        min(ratio, CUT_AT) + 0.02, place, f"{runner}  {time}{far}", va="center", fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )  # fmt: skip
    if ratio > CUT_AT:
        axes.plot([CUT_AT * 0.93, CUT_AT * 0.95], [place + 0.6, place - 0.6], "w-", linewidth=3)


def _finish(axes: Any) -> None:
    axes.axvline(1.0, color="#555555", linewidth=0.8, linestyle=":", zorder=0)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    longest = axes.dataLim.x1
    axes.set_xlim(0, longest * (1.3 if longest >= CUT_AT else 1.2) + 0.05)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.set_xlabel("multiple of eager's; less is faster")
    axes.spines[["top", "right", "left"]].set_visible(False)


def wild(found: Wild, path: Path) -> None:
    """Two bars per program and runner: step and total, as multiples of eager's."""
    pyplot = _pyplot()
    if not found.outcomes:
        raise NoPicture("no picture: no program was run")
    height = 1.6 + 0.42 * len(found.outcomes)
    figure, panels = pyplot.subplots(1, 2, figsize=(11, height), layout="constrained")
    for axes, (what, title) in zip(panels, WILD.items(), strict=True):
        for offset, runner in ((-0.2, "torpor"), (0.2, "compile")):
            _draw_wild(axes, found, runner, what, offset)
        axes.set_title(title, fontsize=10)
        axes.set_yticks(range(len(found.outcomes)), [o.program for o in found.outcomes])
        _finish(axes)
    figure.legend(
        *panels[0].get_legend_handles_labels(), ncols=2, frameon=False, loc="outside lower center"
    )
    figure.suptitle(f"Ordinary programs: {machine('cpu')}", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


WILD = {"step_ms": "step after warm-up", "total_s": "whole run, compiling included"}


def _draw_wild(axes: Any, found: Wild, runner: str, what: str, offset: float) -> None:
    ratios = [outcome.ratio(runner, what) for outcome in found.outcomes]
    bars = [(place + offset, ratio) for place, ratio in enumerate(ratios) if ratio is not None]
    lengths = [min(ratio, CUT_AT) for _, ratio in bars]
    label = "torch.compile" if runner == "compile" else runner
    axes.barh([at for at, _ in bars], lengths, height=0.38, color=COLOURS[runner], label=label)
    for at, ratio in bars:
        axes.text(min(ratio, CUT_AT) + 0.02, at, f"{ratio:.2f}", va="center", fontsize=7)


def growth(points: list[Growth], path: Path) -> None:
    """Cost by number of layers, both axes logarithmic."""
    pyplot = _pyplot()
    measured = [point for point in points if not point.error]
    if not measured:
        raise NoPicture("no picture: no size was measured")
    layers = [point.layers for point in measured]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 4.4), width_ratios=[3, 2], layout="constrained"
    )
    for name, colour, mark, values in _times(measured):
        left.loglog(layers, values, marker=mark, color=colour, label=name)
    left.set_ylabel("ms")
    left.legend(frameon=False, fontsize=9)
    right.loglog(layers, [point.memory / 2**20 for point in measured], marker="D", color="#e8a33d")
    right.set_ylabel("peak memory, MiB")
    for axes in (left, right):
        _finish_growth(axes, layers)
    right.yaxis.set_major_locator(import_module("matplotlib.ticker").LogLocator(subs=(1, 2, 5)))
    figure.suptitle("Training step of a small GPT as layers are added", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _finish_growth(axes: Any, layers: list[int]) -> None:
    axes.set_xticks(layers, [str(count) for count in layers])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,g}")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, high / 10), high)  # at least a decade, so that a flat line looks flat
    axes.set_xlabel("layers")
    axes.grid(True, which="major", color="#e5e5e5")
    axes.spines[["top", "right"]].set_visible(False)


def _times(points: list[Growth]) -> list[tuple[str, str, str, list[float]]]:
    return [
        ("compile, nothing cached", "#4c78a8", "s", [p.compile_s * 1e3 for p in points]),
        ("whole step, warm", "#9a9a9a", "x", [point.step_ms for point in points]),
        ("recording, warm", "#b5304b", "o", [point.trace_ms for point in points]),
        ("sync(), warm", "#6d3a7c", "^", [point.sync_ms for point in points]),
    ]
