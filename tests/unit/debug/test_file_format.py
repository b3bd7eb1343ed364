"""A record file is whole or refused: whatever is wrong with it is told, and nothing is run."""

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torpor.debug import file_format
from torpor.debug.file_format import END, MAGIC, Reader, Writer
from torpor.errors import RecordFileError


def written(path: Path, *parts: bytes, **manifest: Any) -> Path:
    writer = Writer(path)
    for blob in parts:
        writer.add(blob)
    writer.close(manifest)
    return path


def with_manifest(path: Path, text: bytes, body: bytes = b"") -> Path:
    """A file with a manifest of our own, its sum and its place right."""
    offset = len(MAGIC) + len(body)
    trailer = struct.pack("<QQ32s8s", offset, len(text), hashlib.sha256(text).digest(), END)
    path.write_bytes(MAGIC + body + text + trailer)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(RecordFileError) as caught:
        Reader(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_what_is_written_is_read(tmp_path):
    path = written(tmp_path / "f", b"one", b"", b"three", answer=42)
    with Reader(path) as reader:
        assert reader.manifest["answer"] == 42
        assert [reader.blob(i, "here") for i in range(3)] == [b"one", b"", b"three"]


def test_equal_blobs_are_stored_once(tmp_path):
    writer = Writer(tmp_path / "f")
    assert writer.add(b"x" * 1000) == writer.add(b"x" * 1000)
    assert writer.add(b"y") != writer.add(b"x" * 1000)
    writer.close({})
    assert os.path.getsize(tmp_path / "f") < 2000


def test_the_name_appears_when_the_file_is_whole(tmp_path):
    writer = Writer(tmp_path / "f")
    writer.add(b"x")
    assert not (tmp_path / "f").exists()
    writer.close({})
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_discarded_file_leaves_nothing_and_keeps_what_was_there(tmp_path):
    (tmp_path / "f").write_text("older")
    writer = Writer(tmp_path / "f")
    writer.discard()
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "older"


def test_no_file(tmp_path):
    assert "No such file" in refusal(tmp_path / "none")


def test_a_folder(tmp_path):
    assert "directory" in refusal(tmp_path)


def test_another_file(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"PK\x03\x04 and so on")
    assert "not a torpor record" in refusal(path)


def test_a_newer_version(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(MAGIC.replace(b"1", b"7") + bytes(100))
    assert "version 7" in refusal(path)


@pytest.mark.parametrize("kept", [0, 5, 16, 40, -1, -9, -60])
def test_a_file_that_was_cut_off(tmp_path, kept):
    path = written(tmp_path / "f", b"x" * 100, answer=1)
    path.write_bytes(path.read_bytes()[:kept])
    assert "cut off" in refusal(path) or "not a torpor record" in refusal(path)


def test_a_damaged_manifest(tmp_path):
    path = written(tmp_path / "f", b"x", answer=1)
    path.write_bytes(path.read_bytes().replace(b'"answer":1', b'"answer":2'))
    assert "SHA-256" in refusal(path)


def test_a_damaged_blob_is_found_when_it_is_read(tmp_path):
    path = written(tmp_path / "f", b"contents")
    path.write_bytes(path.read_bytes().replace(b"contents", b"c0ntents"))
    with Reader(path) as reader, pytest.raises(RecordFileError, match=r"blob 0 at 64 is damaged"):
        reader.blob(0, "run 0: input 3")


def test_a_manifest_that_claims_to_be_huge(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(MAGIC + struct.pack("<QQ32s8s", 16, 1 << 60, bytes(32), END))
    assert "bytes are allowed" in refusal(path) or "are allowed" in refusal(path)


def test_a_manifest_outside_the_file(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(MAGIC + struct.pack("<QQ32s8s", 1 << 40, 5, bytes(32), END))
    assert "cannot be 5 bytes at" in refusal(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested"),
        (b"{", "not the JSON"),
        (b"\xff\xfe", "not the JSON"),
        (b"[]", "not a JSON object"),
        (b'{"blobs": [], "blobs": []}', "twice"),
        (b'{"blobs": NaN}', "no JSON"),
        (b'{"blobs": %s}' % (b"9" * 10_000), "not the JSON"),
        (b"{}", "'blobs' is missing"),
        (b'{"blobs": 3}', "not a list"),
        (b'{"blobs": [[0, 4, "00"]]}', "not in the file"),
        (b'{"blobs": [[16, 4611686018427387904, "00"]]}', "expected an integer"),
        (b'{"blobs": [[-1, 4, "00"]]}', "expected an integer"),
        (b'{"blobs": [[16.5, 4, "00"]]}', "expected an integer"),
        (b'{"blobs": [[true, 4, "00"]]}', "expected an integer"),
        (b'{"blobs": [[16, 4, 5]]}', "expected offset"),
        (b'{"blobs": [[16, 4]]}', "expected offset"),
        (b'{"blobs": [[16, 4, "zz"]]}', "hexadecimal"),
        (b'{"blobs": [[16, 9999, "00"]]}', "not in the file"),
    ],
)
def test_a_hostile_manifest(tmp_path, text, what):
    assert what in refusal(with_manifest(tmp_path / "f", text, b"body"))


def test_a_blob_number_that_is_none(tmp_path):
    with Reader(written(tmp_path / "f", b"x")) as reader:
        for number in (1, -1, "0", None, True, 1.0):
            with pytest.raises(RecordFileError, match="somewhere"):
                reader.blob(number, "somewhere")
        with pytest.raises(RecordFileError, match="1 bytes where 8 belong"):
            reader.blob(0, "somewhere", 8)


def test_a_text_that_is_none(tmp_path, monkeypatch):
    with Reader(written(tmp_path / "f", b"\xff\xff", b"too long")) as reader:
        with pytest.raises(RecordFileError, match="not UTF-8"):
            reader.text(0, "graph 0")
        monkeypatch.setattr(file_format, "MAX_TEXT", 3)
        with pytest.raises(RecordFileError, match="too long"):
            reader.text(1, "graph 0")


@pytest.mark.parametrize("depth", [1, 5])
def test_depth_counts_brackets_outside_strings(depth):
    nested: Any = '[[[["]\\'
    for _ in range(depth):
        nested = [nested]
    assert file_format._depth(json.dumps(nested).encode()) == depth


@given(data=st.data())
@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_damage_is_refused_or_harmless(data, tmp_path):
    """Bytes flipped, cut or added anywhere: the contents are the same or the file is refused."""
    path = written(tmp_path / "f", b"0123456789" * 10, b"abc", answer=list(range(20)))
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        match data.draw(st.sampled_from("flip cut insert".split())):
            case "flip":
                whole[place] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del whole[place:]
            case "insert":
                whole[place:place] = data.draw(st.binary(max_size=20))
        if not whole:
            break
    path.write_bytes(whole)
    try:
        with Reader(path) as reader:
            contents = reader.manifest["answer"], reader.blob(0, "a"), reader.blob(1, "b")
    except RecordFileError:
        return
    assert contents == (list(range(20)), b"0123456789" * 10, b"abc")
