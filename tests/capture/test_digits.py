"""Literals and numbers read at many positions at once, beside Python reading them one by one."""

from __future__ import annotations

import re
from decimal import Decimal

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from instrument.trace.digits import stands, thousandths_before, whole_after, whole_before

MARGIN = b" " * 32
ANY_BYTE = st.binary(min_size=1, max_size=1)
NUMBERS = st.one_of(
    st.integers(0, 10**17).map(str),
    st.decimals(0, 10**10, places=3).map(str),
    st.text("0123456789.", max_size=20),
    st.text("0123456789.,-eE/:", max_size=6),
)
PIECES = st.lists(st.tuples(ANY_BYTE, NUMBERS.map(str.encode), ANY_BYTE), min_size=1, max_size=20)


def placed(pieces: list[tuple[bytes, bytes, bytes]]) -> tuple[bytes, list[int], list[int]]:
    """The pieces in one text, and where the middle of each begins and ends."""
    text, begins, ends = MARGIN, [], []
    for before, number, behind in pieces:
        begins.append(len(text) + 1)
        ends.append(begins[-1] + len(number))
        text += before + number + behind
    return text + MARGIN, begins, ends


def plain(digits: bytes) -> bool:
    return len(digits) <= 16 and re.fullmatch(rb"0|[1-9][0-9]*", digits) is not None


@given(PIECES)
@settings(max_examples=300)
def test_whole_numbers_are_those_of_int(pieces) -> None:
    text, begins, ends = placed(pieces)
    for read, places, pattern in (
        (whole_after, begins, rb"[0-9]*"),
        (whole_before, ends, rb"[0-9]*\Z"),
    ):
        values, lengths = read(text, np.array(places))
        for place, value, length in zip(places, values.tolist(), lengths.tolist()):
            here = (
                text[place : place + 16]
                if read is whole_after
                else text[max(place - 16, 0) : place]
            )
            digits = (
                re.search(pattern, here)[0] if read is whole_before else re.match(pattern, here)[0]
            )
            assert length == (len(digits) if plain(digits) else 0)
            assert length == 0 or value == int(digits)


@given(PIECES)
@settings(max_examples=300)
def test_times_are_those_of_decimal(pieces) -> None:
    text, _, ends = placed(pieces)
    values, lengths = thousandths_before(text, np.array(ends))
    for end, value, length in zip(ends, values.tolist(), lengths.tolist()):
        found = re.search(rb"([0-9]+)(\.[0-9]{1,3})?\Z", text[:end])
        if found and not found[2] and re.search(rb"\.[0-9]{1,3}\Z", text[:end]):
            found = None  # decimals of nothing
        whole = found[1][-16:] if found else b""
        understood = plain(whole) and int(whole) < 9 * 10**15
        assert length == (len(whole) + len(found[2] or b"") if understood else 0)
        assert length == 0 or value == Decimal(text[end - length : end].decode()) * 1000


@given(
    st.text("abc\0", min_size=1, max_size=20).map(str.encode),
    st.text("abc\0", max_size=60).map(str.encode),
)
def test_a_literal_stands_where_the_text_has_it(literal, text) -> None:
    at = np.arange(len(text) + 1)
    padded = text + b" " * (len(literal) + 8)
    assert stands(padded, literal, at).tolist() == [padded.startswith(literal, k) for k in at]
