"""The store on disk: what goes in comes out, whatever else happens to the files."""

import errno
import multiprocessing
import os
import secrets
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torpor import config, metrics
from torpor.cache import store as persistent
from torpor.cache.store import Damaged, NotUsable, Store, default_directory, key_of
from torpor.errors import TorporWarning

KEY, OTHER = key_of("one"), key_of("two")
CONTENT = bytes(range(256)) * 20

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def no_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been warned of in this process, and no directory been used."""
    monkeypatch.setattr(persistent, "_warned", set())
    monkeypatch.setattr(persistent, "_stores", {})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache", 1 << 20)


def path_of(store: Store, key: str = KEY) -> Path:
    return store.directory / "entries" / key


def leftovers(store: Store) -> list[str]:
    return [name for name in os.listdir(store.directory / "entries") if name.startswith(".")]


# -- keys ------------------------------------------------------------------------------------------


def test_a_key_tells_its_parts_apart() -> None:
    assert len({key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("ab", "c", "")}) == 4
    assert key_of("ab", "c") == key_of("ab", "c")


@pytest.mark.parametrize("key", ["", "x", "../secret", KEY.upper(), KEY + "0", f"{KEY}\n"])
def test_what_is_no_key_is_refused(store: Store, key: str) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        store.read(key)
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        store.write(key, {}, b"")


# -- in and out ------------------------------------------------------------------------------------


def test_what_was_written_is_read_by_another_store(store: Store) -> None:
    assert store.read(KEY) is None
    assert store.write(KEY, {"backend": "some"}, CONTENT)
    other = Store(store.directory)
    assert other.read(KEY) == CONTENT
    assert other.load(path_of(store))[0] == {"backend": "some", "key": KEY}
    assert other.read(OTHER) is None
    assert leftovers(store) == []


def test_an_entry_without_contents_is_one(store: Store) -> None:
    assert store.write(KEY, {}, b"")
    assert store.read(KEY) == b""


def test_the_latest_that_was_written_counts(store: Store) -> None:
    store.write(KEY, {}, b"before")
    store.write(KEY, {}, b"after")
    assert store.read(KEY) == b"after"
    assert len(store.entries()) == 1


def test_a_miss_costs_one_look(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(KEY, {}, CONTENT)
    looked: list[str] = []
    real = os.stat

    def count(path: Any, *args: Any, **keywords: Any) -> Any:
        looked.append(str(path))
        return real(path, *args, **keywords)

    monkeypatch.setattr(os, "stat", count)
    monkeypatch.setattr(os, "open", None)
    assert store.read(OTHER) is None
    assert looked == [str(path_of(store, OTHER))]


def test_only_the_user_can_read_what_is_kept(store: Store) -> None:
    before = os.umask(0)
    try:
        store.write(KEY, {}, CONTENT)
    finally:
        os.umask(before)
    for path in (store.directory, store.directory / "entries"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in (store.directory / "secret", path_of(store)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


# -- damage ----------------------------------------------------------------------------------------

FLIPS = st.tuples(st.just("flip"), st.integers(0, 1 << 20), st.integers(1, 255))
CUTS = st.tuples(st.just("cut"), st.integers(0, 1 << 20), st.just(0))
INSERTIONS = st.tuples(st.just("insert"), st.integers(0, 1 << 20), st.integers(0, 255))


def damaged(data: bytes, how: str, place: int, byte: int) -> bytes:
    place %= len(data)
    if how == "flip":
        return data[:place] + bytes([data[place] ^ byte]) + data[place + 1 :]
    return data[:place] if how == "cut" else data[:place] + bytes([byte]) + data[place:]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(damage=st.one_of(FLIPS, CUTS, INSERTIONS))
def test_every_damaged_entry_is_a_miss_and_is_replaced(
    store: Store, damage: tuple[str, int, int]
) -> None:
    store.write(KEY, {"backend": "some"}, CONTENT)
    path = path_of(store)
    path.write_bytes(damaged(path.read_bytes(), *damage))
    before = metrics.counters().get("DiskCacheRefused", 0)
    assert store.read(KEY) is None
    assert metrics.counters()["DiskCacheRefused"] == before + 1
    assert not path.exists()
    assert store.write(KEY, {}, CONTENT)
    assert store.read(KEY) == CONTENT


def test_bytes_of_any_kind_are_a_miss(store: Store) -> None:
    store.write(KEY, {}, CONTENT)
    for data in (
        b"",
        b"x",
        persistent.MAGIC,
        persistent.MAGIC + bytes(36),
        secrets.token_bytes(99),
    ):
        path_of(store).write_bytes(data)
        os.chmod(path_of(store), 0o600)
        assert store.read(KEY) is None


def test_an_entry_under_the_name_of_another_is_a_miss(store: Store) -> None:
    store.write(KEY, {}, CONTENT)
    os.rename(path_of(store), path_of(store, OTHER))
    with pytest.raises(Damaged, match="another key"):
        store.load(path_of(store, OTHER))
    assert store.read(OTHER) is None


def test_an_entry_from_another_cache_is_a_miss(store: Store, tmp_path: Path) -> None:
    other = Store(tmp_path / "other")
    other.write(KEY, {}, CONTENT)
    store.write(OTHER, {}, CONTENT)
    os.rename(path_of(other), path_of(store))
    assert store.read(KEY) is None
    assert store.read(OTHER) == CONTENT


@pytest.mark.parametrize("secret", [b"", b"short", bytes(33)])
def test_a_damaged_secret_is_replaced_and_all_is_missed(store: Store, secret: bytes) -> None:
    store.write(KEY, {}, CONTENT)
    (store.directory / "secret").write_bytes(secret)
    fresh = Store(store.directory)
    assert fresh.read(KEY) is None
    assert fresh.write(KEY, {}, CONTENT)
    assert Store(store.directory).read(KEY) == CONTENT
    assert len((store.directory / "secret").read_bytes()) == 32


# -- whose it is -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_others_can_write_to_is_not_used(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "cache")
    store.write(KEY, {}, CONTENT)
    os.chmod(store.directory, mode)
    monkeypatch.setattr(config, "cache", True)
    monkeypatch.setattr(config, "cache_dir", str(store.directory))
    with pytest.warns(TorporWarning, match="others can write to"):
        assert persistent.store() is None
    assert persistent.store() is None  # and says so once
    assert path_of(store).exists()


def test_a_directory_that_others_can_read_is_used(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    os.chmod(tmp_path / "cache", 0o755)
    assert Store(tmp_path / "cache").write(KEY, {}, CONTENT)


def test_a_file_others_can_write_to_is_a_miss(store: Store) -> None:
    store.write(KEY, {}, CONTENT)
    os.chmod(path_of(store), 0o620)
    with pytest.warns(TorporWarning, match="others can write to"):
        assert store.read(KEY) is None


def test_a_file_of_another_user_is_a_miss(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(KEY, {}, CONTENT)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(TorporWarning, match="belongs to another user"):
        assert store.read(KEY) is None


def test_a_directory_of_another_user_is_not_used(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(KEY, {}, CONTENT)
    monkeypatch.setattr(config, "cache", True)
    monkeypatch.setattr(config, "cache_dir", str(store.directory))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(TorporWarning, match="belongs to another user"):
        assert persistent.store() is None


def test_a_link_is_a_miss(store: Store, tmp_path: Path) -> None:
    store.write(KEY, {}, CONTENT)
    elsewhere = tmp_path / "elsewhere"
    os.rename(path_of(store), elsewhere)
    os.symlink(elsewhere, path_of(store))
    with pytest.warns(TorporWarning, match="is a link"):
        assert store.read(KEY) is None
    assert elsewhere.exists()
    assert not path_of(store).is_symlink()


def test_a_directory_in_the_place_of_an_entry_is_a_miss(store: Store) -> None:
    store.write(KEY, {}, CONTENT)
    path_of(store).unlink()
    path_of(store).mkdir()
    with pytest.warns(TorporWarning):
        assert store.read(KEY) is None


def test_a_file_in_the_place_of_the_directory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setattr(config, "cache", True)
    monkeypatch.setattr(config, "cache_dir", str(tmp_path / "cache"))
    with pytest.warns(TorporWarning, match="is not a directory"):
        assert persistent.store() is None


# -- disks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reason", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO]
)
@pytest.mark.parametrize("call", ["fsync", "open", "replace"])
def test_a_disk_that_cannot_be_written_to_costs_one_warning(
    store: Store, call: str, reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(OTHER, {}, CONTENT)

    def fail(path: Any, flags: Any = 0, *rest: Any, **keywords: Any) -> Any:
        if call == "open" and not flags & os.O_CREAT:
            return real(path, flags, *rest, **keywords)
        raise OSError(reason, os.strerror(reason))

    real = os.open
    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.warns(TorporWarning, match=os.strerror(reason)):
            assert not store.write(KEY, {}, CONTENT)
        assert not store.write(KEY, {}, CONTENT)  # and says so once
        assert store.read(OTHER) == CONTENT
    assert leftovers(store) == []
    assert store.read(KEY) is None


def is_root() -> bool:
    return os.geteuid() == 0


@pytest.mark.skipif(not is_root(), reason="mounting a small disk needs root")
def test_a_full_disk_keeps_what_it_has(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no mounts here: {mounted.stderr.decode()}")
    try:
        store = Store(disk / "cache", 1 << 30)
        assert store.write(KEY, {}, CONTENT)
        with pytest.warns(TorporWarning, match="No space left"):
            assert not store.write(OTHER, {}, bytes(1 << 20))
        assert store.read(KEY) == CONTENT
        assert store.read(OTHER) is None
        assert leftovers(store) == []
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(is_root(), reason="root may write everywhere")
def test_a_directory_without_leave_to_write_is_read(store: Store) -> None:
    store.write(KEY, {}, CONTENT)
    entries = store.directory / "entries"
    os.chmod(entries, 0o500)
    try:
        fresh = Store(store.directory)
        assert fresh.read(KEY) == CONTENT
        with pytest.warns(TorporWarning, match="Permission denied"):
            assert not fresh.write(OTHER, {}, CONTENT)
    finally:
        os.chmod(entries, 0o700)


def test_a_read_that_fails_is_a_miss(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(KEY, {}, CONTENT)

    def fail(*args: Any, **keywords: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "open", fail)
    with pytest.warns(TorporWarning, match="cannot be read"):
        assert store.read(KEY) is None
    assert store.read(KEY) is None  # and says so once


# -- how much --------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache", 10_000)
    keys = [key_of(str(i)) for i in range(3)]
    for age, key in enumerate(reversed(keys)):
        store.write(key, {}, bytes(3000))
        os.utime(path_of(store, key), (1_000_000 - age, 1_000_000 - age))
    assert [entry.key for entry in store.entries()] == keys
    assert store.read(keys[0]) is not None  # now the most recently used
    assert store.write(KEY, {}, bytes(3000))
    assert {entry.key for entry in store.entries()} == {keys[0], keys[2], KEY}


def test_all_that_is_kept_fits(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache", 10_000)
    for i in range(20):
        store.write(key_of(str(i)), {}, bytes(i * 150))
        assert sum(entry.nbytes for entry in store.entries()) <= 10_000
    assert store.entries()


def test_what_does_not_fit_at_all_is_not_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache", 1000)
    store.write(KEY, {}, bytes(10))
    assert not store.write(OTHER, {}, bytes(1000))
    assert store.read(KEY) == bytes(10)


def test_the_size_is_the_users_to_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "cache")
    store.write(KEY, {}, bytes(2000))
    monkeypatch.setattr(config, "cache_bytes", 3000)
    store.write(OTHER, {}, bytes(2000))
    assert [entry.key for entry in store.entries()] == [OTHER]


def test_clear_leaves_nothing(store: Store) -> None:
    store.write(KEY, {}, CONTENT)
    store.write(OTHER, {}, CONTENT)
    (store.directory / "entries" / ".unfinished-1-x").touch()
    assert store.clear() == 2
    assert os.listdir(store.directory / "entries") == []
    assert store.clear() == 0


def test_what_was_left_unfinished_long_ago_is_removed(store: Store) -> None:
    store.write(KEY, {}, CONTENT)
    old, new = (store.directory / "entries" / f".unfinished-1-{name}" for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (1000, 1000))
    store.write(OTHER, {}, CONTENT)
    assert leftovers(store) == [new.name]


def test_files_of_others_are_left_alone(store: Store) -> None:
    store.write(KEY, {}, CONTENT)
    foreign = store.directory / "entries" / "notes.txt"
    foreign.write_text("mine")
    assert [entry.key for entry in store.entries()] == [KEY]
    store.clear()
    assert foreign.read_text() == "mine"


# -- processes -------------------------------------------------------------------------------------


def content_of(key: str) -> bytes:
    return bytes.fromhex(key) * 500


def hammer(directory: Path, seed: int, limit: int) -> None:
    """Write and read as fast as possible; whatever is read is what was written."""
    store = Store(directory, limit)
    keys = [key_of(str(i)) for i in range(12)]
    for turn in range(60):
        key = keys[(turn * 7 + seed) % len(keys)]
        if turn % 3:
            store.write(key, {"seed": seed}, content_of(key))
        found = store.read(key)
        assert found in (None, content_of(key))
    assert not persistent._warned, persistent._warned


@pytest.mark.parametrize("limit", [1 << 20, 100_000])
def test_processes_at_once_read_only_what_was_written(tmp_path: Path, limit: int) -> None:
    context = multiprocessing.get_context("fork")
    crowd = [context.Process(target=hammer, args=(tmp_path / "c", i, limit)) for i in range(8)]
    for process in crowd:
        process.start()
    for process in crowd:
        process.join()
    assert [process.exitcode for process in crowd] == [0] * 8
    store = Store(tmp_path / "c", limit)
    for entry in store.entries():
        assert store.read(entry.key) == content_of(entry.key)
    assert leftovers(store) == []


WRITES_FOR_EVER = """
import sys
from pathlib import Path
from torpor.cache.store import Store, key_of
store = Store(Path(sys.argv[1]), 1 << 30)
print("ready", flush=True)
while True:
    store.write(key_of("one"), {}, bytes(range(256)) * 20_000)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITES_FOR_EVER, str(tmp_path / "cache")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_writer_that_is_killed_leaves_no_damage(
    tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    store = Store(tmp_path / "cache", 1 << 30)
    assert writer.stdout is not None
    writer.stdout.readline()
    deadline = time.monotonic() + 30
    while not (store.directory / "entries").exists() or not leftovers(store):
        assert time.monotonic() < deadline
    writer.send_signal(signal.SIGKILL)  # in the middle of a write, most likely
    writer.wait()
    found = store.read(KEY)
    assert found in (None, bytes(range(256)) * 20_000)
    assert store.write(KEY, {}, CONTENT)
    assert Store(store.directory).read(KEY) == CONTENT


# -- where -----------------------------------------------------------------------------------------


def test_the_directory_is_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "torpor"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory() == tmp_path / ".cache" / "torpor"


def test_the_directory_is_the_users_to_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "cache_dir", "~/kept")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert persistent.directory() == tmp_path / "kept"


def test_a_user_without_a_home_has_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(config, "cache", True)
    monkeypatch.setattr(config, "cache_dir", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(TorporWarning, match="home directory"):
        assert persistent.store() is None


def test_switched_off_there_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "cache", False)
    assert persistent.store() is None


def test_a_directory_is_made_when_something_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "deep" / "down"
    monkeypatch.setattr(config, "cache", True)
    monkeypatch.setattr(config, "cache_dir", str(where))
    store = persistent.store()
    assert store is not None
    assert store.read(KEY) is None
    assert not where.exists()
    assert store.write(KEY, {}, CONTENT)
    assert persistent.store() is store
    with pytest.raises(NotUsable, match="not a directory"):
        persistent.check_directory(path_of(store))
