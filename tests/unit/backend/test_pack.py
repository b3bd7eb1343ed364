"""Named bytes in one: what goes in comes out, and nothing else does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.backend.pack import pack, unpack

CONTENTS = st.dictionaries(st.text(max_size=8), st.binary(max_size=40), max_size=5)


@settings(deadline=None)
@given(CONTENTS)
def test_what_was_packed_is_unpacked(contents: dict[str, bytes]) -> None:
    assert unpack(pack(contents)) == contents
    assert list(unpack(pack(contents))) == list(contents)


@settings(deadline=None)
@given(CONTENTS, st.data())
def test_what_is_cut_short_is_refused(contents: dict[str, bytes], data: st.DataObject) -> None:
    packed = pack(contents)
    length = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(ValueError):
        unpack(packed[:length])


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="packed bytes of length"):
        unpack(pack({"a": b"b"}) + b"c")


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_other_bytes_are_refused_or_are_packed(data: bytes) -> None:
    try:
        contents = unpack(data)
    except ValueError:
        return
    assert sum(map(len, contents.values())) < len(data)
