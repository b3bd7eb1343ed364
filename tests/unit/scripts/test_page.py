"""The built page is told apart from one that is not what its sources say."""

import json

import pytest

from scripts import page


@pytest.fixture
def folders(tmp_path):
    web, built = tmp_path / "web", tmp_path / "page"
    (web / "src").mkdir(parents=True)
    (web / "node_modules" / "library").mkdir(parents=True)
    built.mkdir()
    (web / "src" / "main.ts").write_text("main")
    (web / "node_modules" / "library" / "index.js").write_text("not ours")
    (built / "app.js").write_text("built")
    (built / page.SUMS).write_text(json.dumps(page.sums(web, built)))
    return web, built


def test_the_page_of_this_repository_is_built_from_its_sources():
    assert page.stale() == []


def test_what_was_just_built_is_not_stale(folders):
    web, built = folders
    (web / "node_modules" / "library" / "index.js").write_text("another version")
    assert page.stale(web, built) == []


def test_changed_new_and_missing_files_are_noticed(folders):
    web, built = folders
    (web / "src" / "main.ts").write_text("other")
    assert page.stale(web, built) == ["web/"]
    (built / "app.js").write_text("by hand")
    assert page.stale(web, built) == ["app.js", "web/"]
    (built / "new.js").write_text("")
    (built / "app.js").unlink()
    assert page.stale(web, built) == ["app.js", "new.js", "web/"]


def test_the_names_of_sources_count(folders):
    web, built = folders
    (web / "src" / "main.ts").rename(web / "src" / "other.ts")
    assert page.stale(web, built) == ["web/"]
