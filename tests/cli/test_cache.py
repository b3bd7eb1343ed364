"""``torpor cache`` lists, checks, removes and carries compiled graphs."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from torpor import config
from torpor.cache.store import Store, key_of
from torpor.cli import main, terminal

KEYS = sorted(key_of(str(i)) for i in range(3))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Three entries in the directory that the commands find by themselves."""
    monkeypatch.setattr(config, "cache_dir", str(tmp_path / "cache"))
    store = Store(tmp_path / "cache")
    for age, key in enumerate(KEYS):
        about = {"backend": "some", "nodes": 7 * age, "compile_seconds": 1.5, "made": 1_700_000_000}
        store.write(key, about, content(key))
        os.utime(store.directory / "entries" / key, (1_800_000_000 + age, 1_800_000_000 + age))
    return store


def content(key: str) -> bytes:
    return bytes.fromhex(key) * 100


def damage(store: Store, key: str) -> None:
    path = store.directory / "entries" / key
    path.write_bytes(path.read_bytes()[:-1])


def reported(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    assert main(["cache", *map(str, arguments)]) == status
    return capsys.readouterr().out


# -- ls --------------------------------------------------------------------------------------------


def test_ls_shows_every_entry_the_least_recently_used_first(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "HAVE_RICH", False)
    lines = reported(capsys, "ls").splitlines()
    assert lines[0].split("  ")[0] == "key"
    assert [line.split()[0] for line in lines[2:5]] == [key[:12] for key in KEYS]
    assert len({len(line) for line in lines[:5]}) == 1  # columns align
    assert lines[2].split()[1:3] == ["some", "0"]
    assert "1.50 s" in lines[2]
    assert lines[-1].startswith("3 graphs, ")
    assert lines[-1].endswith(f"of 4.0 GiB, in {store.directory}")


def test_ls_in_json(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(reported(capsys, "ls", "--json"))
    assert found["directory"] == str(store.directory)
    assert found["limit"] == config.cache_bytes
    assert found["bytes"] == sum(entry["bytes"] for entry in found["entries"])
    assert [entry["key"] for entry in found["entries"]] == KEYS
    first = found["entries"][0]
    assert (first["backend"], first["compile_seconds"]) == ("some", 1.5)
    assert first["used"] == 1_800_000_000


@pytest.mark.parametrize("data", [b"", b"no entry at all", bytes(200)])
def test_ls_shows_what_is_no_entry_any_more(
    store: Store, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    (store.directory / "entries" / KEYS[0]).write_bytes(data)
    text = reported(capsys, "ls")
    assert KEYS[0][:12] in text
    assert "?" in text


def test_ls_where_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = reported(capsys, "ls", "--dir", tmp_path / "nowhere")
    assert text.startswith("0 graphs, 0 B of ")
    assert not (tmp_path / "nowhere").exists()


def test_a_directory_others_can_write_to_is_refused(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    os.chmod(store.directory, 0o777)
    assert main(["cache", "ls"]) == 2
    assert "others can write to" in capsys.readouterr().err


# -- verify and clear ------------------------------------------------------------------------------


@pytest.mark.usefixtures("store")
def test_verify_finds_nothing_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert reported(capsys, "verify") == "3 graphs, all good\n"
    assert json.loads(reported(capsys, "verify", "--json"))["good"] == 3


def test_verify_finds_what_is_damaged(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    damage(store, KEYS[1])
    text = reported(capsys, "verify", status=1)
    assert KEYS[1][:12] in text
    assert "signature is wrong" in text
    assert KEYS[0][:12] not in text
    found = json.loads(reported(capsys, "verify", "--json", status=1))
    assert list(found["damaged"]) == [KEYS[1]]
    assert found["good"] == 2
    assert len(store.entries()) == 3


def test_verify_removes_what_is_damaged_if_asked(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(store, KEYS[1])
    assert "removed" in reported(capsys, "verify", "--remove", status=1)
    assert [entry.key for entry in store.entries()] == [KEYS[0], KEYS[2]]
    assert reported(capsys, "verify") == "2 graphs, all good\n"


def test_clear_removes_all(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert reported(capsys, "clear") == f"3 graphs removed from {store.directory}\n"
    assert store.entries() == []
    assert reported(capsys, "clear").startswith("0 graphs removed")


# -- export and import -----------------------------------------------------------------------------


@pytest.fixture
def archive(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "warm.zip"
    assert reported(capsys, "export", path).startswith(f"3 graphs in {path}, ")
    return path


def test_what_is_exported_can_be_imported_elsewhere(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    text = reported(capsys, "import", "--trust", archive, "--dir", elsewhere)
    assert text == f"3 graphs taken into {elsewhere}\n"
    other = Store(elsewhere)
    assert {entry.key: other.read(entry.key) for entry in other.entries()} == {
        key: content(key) for key in KEYS
    }
    about = other.about(other.entries()[0])
    assert about["imported"] is True
    assert about["backend"] == "some"


def test_nothing_is_imported_that_the_user_does_not_trust(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "import", str(archive), "--dir", str(tmp_path / "elsewhere")]) == 2
    reported = capsys.readouterr().err
    assert "runs the code in it" in reported
    assert f"torpor cache import --trust {archive}" in reported
    assert not (tmp_path / "elsewhere").exists()


def test_damaged_entries_are_not_exported(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(store, KEYS[0])
    assert reported(capsys, "export", tmp_path / "some.zip").startswith("2 graphs in")


def test_an_export_that_fails_leaves_no_file(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert store.entries()
    assert main(["cache", "export", str(tmp_path / "missing" / "a.zip")]) == 2
    assert "No such file" in capsys.readouterr().err


def rewritten(archive: Path, change: Any) -> Path:
    """A copy of an archive with its files changed."""
    path = archive.with_name("rewritten.zip")
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(path, "w") as new:
        files = change({name: old.read(name) for name in old.namelist()})
        for name, data in files.items():
            new.writestr(name, data)
    return path


def manifest_with(files: dict[str, bytes], **changes: Any) -> dict[str, bytes]:
    manifest = json.loads(files["manifest.json"])
    manifest["entries"][0].update(changes)
    return {**files, "manifest.json": json.dumps(manifest).encode()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda f: {k: v[:-1] if "entries" in k else v for k, v in f.items()}, "is damaged"),
        (lambda f: {k: v + b"x" if "entries" in k else v for k, v in f.items()}, "is damaged"),
        (lambda f: {"manifest.json": f["manifest.json"]}, "cannot be read"),
        (lambda f: {k: v for k, v in f.items() if k != "manifest.json"}, "no archive"),
        (lambda f: {**f, "manifest.json": b"[]"}, "no archive"),
        (lambda f: {**f, "manifest.json": b"{"}, "no archive"),
        (lambda f: {**f, "manifest.json": b'{"format": 99, "entries": []}'}, "format is 99"),
        (lambda f: manifest_with(f, about={"key": "../../secret"}), "without a key"),
        (lambda f: manifest_with(f, nbytes="many"), "without a key or a size"),
    ],
)
def test_archives_of_any_kind_are_refused(
    archive: Path, change: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = rewritten(archive, change)
    assert main(["cache", "import", "--trust", str(bad), "--dir", str(tmp_path / "other")]) == 2
    assert reason in capsys.readouterr().err
    assert not Store(tmp_path / "other").entries()


@pytest.mark.parametrize("data", [b"", b"text", b"PK\x03\x04 and so on"])
def test_what_is_no_archive_is_refused(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(data)
    assert main(["cache", "import", "--trust", str(tmp_path / "file")]) == 2
    assert "is no archive of compiled graphs" in capsys.readouterr().err
