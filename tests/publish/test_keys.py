"""Keys: what may be one, and that no two share a form."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactly_once.publish import KeyRefused
from exactly_once.publish.keys import GivenKey, checked, checked_all, encoded

KEYS = st.one_of(
    st.binary(min_size=1, max_size=20),
    st.text(st.characters(), min_size=1, max_size=20),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.uuids(),
)


@given(KEYS, KEYS)
def test_keys_are_equal_where_their_bytes_are(one: GivenKey, other: GivenKey) -> None:
    one, other = checked(one), checked(other)
    assert (encoded(one) == encoded(other)) is (one == other)


@pytest.mark.parametrize(
    ("one", "other"), [("1", b"1"), (1, "1"), (1, b"1"), (UUID(int=1), UUID(int=1).bytes), (1, -1)]
)
def test_keys_of_different_types_have_different_bytes(one: GivenKey, other: GivenKey) -> None:
    assert encoded(checked(one)) != encoded(checked(other))


@given(st.lists(KEYS, max_size=20))
def test_many_keys_are_checked_as_single_ones(keys: list[GivenKey]) -> None:
    assert checked_all(keys) == [checked(key) for key in keys]


@pytest.mark.parametrize("bad", [b"", "", bytearray(), 1.0, None, False, [], "x" * 1025, b"x" * 1025, 1 << 63])
def test_a_bad_key_is_refused_alone_and_in_company(bad: GivenKey, subtests: pytest.Subtests) -> None:
    with pytest.raises(KeyRefused):
        checked(bad)
    company: list[list[GivenKey]] = [[], [b"good"], ["good"], [b"good", "good", 1]]
    for among in company:
        with subtests.test(str(among)), pytest.raises(KeyRefused):
            checked_all([*among, bad])


def test_a_buffer_is_copied() -> None:
    buffer = bytearray(b"abc")
    one, (other,) = checked(buffer), checked_all([memoryview(buffer)])
    buffer[:] = b"xyz"
    assert one == other == b"abc"


def test_text_that_utf8_cannot_write_is_a_key_too() -> None:
    assert encoded("\ud800") != encoded("?")
