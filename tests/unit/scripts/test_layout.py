"""The line counts of docs/layout.md: what is counted as what, and when the check fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import layout
from scripts.layout import Count, Limit, Row

FILES = {
    "__init__.py": '"""The whole. More of it."""\n',
    "config.py": "a = 1\nb = 2\n",
    "ir/__init__.py": '"""Nodes: what `a | b` is\nmade of. Nothing else.\n\nMore."""\n',
    "ir/node.py": "\n# a comment\n\n",
    "ir/text/__init__.py": '"""Text."""\n',
    "ops/__init__.py": '"""Ops."""\n',
    "ops/_generated/__init__.py": "a\n",
    "ops/_generated/nodes.py": "b\n" * 10,
    "ops/_generated/nodes.pyi": "c\n" * 5,
    "ops/__pycache__/spec.py": "d\n" * 100,
    "execute/__init__.py": '"""Runs."""\n',
    "trace/__init__.py": '"""Records."""\n',
    "native/__init__.py": '"""C++."""\n',
    "native/keys.h": "//\n" * 7,
    "native/recorder.cpp": "//\n" * 20,
    "native/built.so": "e\n" * 100,
    "codegen/__init__.py": '"""Writes."""\n',
    "codegen/op_db.json": "{\n}\n",
    "debug/view/page/app.js": "f\n" * 3,
    "py.typed": "",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "torpor"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def rows(package: Path) -> dict[str, Row]:
    return {row.name: row for row in layout.rows(layout.files_of(package), package)}


def tables(lines: int = 1_000, files: int = 10, limit: Limit | None = None) -> str:
    row = Row("`ir/`", "Nodes.", files, lines)
    return layout.tables([row], [Count("engine", files, lines, limit or Limit(500, 2_000))])


def test_the_page_is_up_to_date_and_no_limit_is_exceeded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert layout.main(["--check"]) == 0, capsys.readouterr().out


def test_every_package_counts_its_own_files_alone(package: Path) -> None:
    found = rows(package)
    assert found["`ir/`"] == Row("`ir/`", "Nodes: what `a \\| b` is made of.", 2, 7)
    assert found["`ir/text/`"] == Row("`ir/text/`", "Text.", 1, 1)
    top = "`torpor`, modules outside a package"
    assert found[top] == Row(top, "The whole.", 2, 3)


def test_cpp_is_hand_written_and_what_was_built_is_not_counted(package: Path) -> None:
    assert rows(package)["`native/`"] == Row("`native/`", "C++.", 3, 28)


def test_generated_text_and_the_page_are_counted_apart(package: Path) -> None:
    found = rows(package)
    assert (found["generated"].files, found["generated"].lines) == (4, 18)
    assert (found["`debug/view/page/`"].files, found["`debug/view/page/`"].lines) == (1, 3)
    assert (found["`ops/`"].files, found["`ops/`"].lines) == (1, 1)
    assert found["`codegen/`"].lines == 1


def test_the_engine_is_the_hand_written_part_of_its_packages(package: Path) -> None:
    engine, generated, hand_written = layout.counts(layout.files_of(package))
    assert (engine.files, engine.lines) == (6, 11)
    assert (generated.files, generated.lines) == (4, 18)
    assert (hand_written.files, hand_written.lines) == (12, 43)


def test_the_engine_may_name_single_files(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "ENGINE", ("ir/node.py", "config.py"))
    assert layout.counts(layout.files_of(package))[0].lines == 5


def test_a_renamed_part_of_the_engine_is_not_passed_over(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "ENGINE", ("ir", "gone"))
    with pytest.raises(SystemExit, match="ENGINE names 'gone'"):
        layout.counts(layout.files_of(package))


def test_a_package_without_a_docstring_is_refused(package: Path) -> None:
    (package / "ir" / "__init__.py").write_text("")
    with pytest.raises(SystemExit, match="needs a docstring"):
        rows(package)


@pytest.mark.parametrize(
    ("lines", "allowed", "problem"),
    [
        (900, 1_000, None),  # above the target, as is known
        (1_000, 1_000, None),
        (1_001, 1_000, "engine: 1,001 lines, 1 more than allowed"),
        (500, 1_000, "engine: the target is reached; set what is allowed to 500"),
        (500, 500, None),
        (501, 500, "engine: 501 lines, 1 more than allowed"),
    ],
)
def test_a_count_may_fall_and_not_grow(lines: int, allowed: int, problem: str | None) -> None:
    assert Count("engine", 1, lines, Limit(target=500, allowed=allowed)).problem() == problem


@pytest.mark.parametrize(
    ("now", "stale"),
    [
        (tables(), False),
        (tables(lines=1_100), False),
        (tables(lines=900), False),
        (tables(lines=1_101), True),
        (tables(lines=899), True),
        (tables(files=12), False),
        (tables(files=13), True),
        (tables(limit=Limit(500, 1_999)), True),
        (tables(limit=Limit(499, 2_000)), True),
        (tables().replace("Nodes.", "Values."), True),
        (tables().replace("`ir/`", "`ops/`"), True),
    ],
)
def test_numbers_may_drift_and_words_may_not(now: str, stale: bool) -> None:
    assert layout.out_of_date(f"# Page\n{tables()}\nmore", now) is stale


def test_large_counts_drift_by_a_share() -> None:
    page = tables(lines=100_000)
    assert not layout.out_of_date(page, tables(lines=104_000))
    assert layout.out_of_date(page, tables(lines=106_000))


def test_a_row_more_or_less_is_out_of_date() -> None:
    row, count = Row("`a/`", "A.", 1, 1), Count("engine", 1, 1, Limit(1, 1))
    one, two = layout.tables([row], [count]), layout.tables([row, row], [count])
    assert layout.out_of_date(one, two)
    assert layout.out_of_date(two, one)


def test_only_what_is_between_the_comments_is_rewritten() -> None:
    page = f"# Page\n\n{tables()}\n\n| `ir/` | another table |\n"
    assert layout.with_tables(page, tables(lines=7)) == page.replace("1,000", "7")
    assert layout.with_tables(page, tables()) == page


def test_a_page_without_the_comments_is_refused() -> None:
    with pytest.raises(SystemExit, match="has lost its comments"):
        layout.with_tables("# Page\n", tables())
