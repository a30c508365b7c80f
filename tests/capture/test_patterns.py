"""Patterns from a file: what Python's own matcher finds, in time that grows with the text alone."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instrument.analysis.breakdown import COMMUNICATION_NAMES
from instrument.patterns import Pattern

PARTS = st.sampled_from([
    "a", "B", "_", ".", r"\.", r"\w", r"\d", r"\W", "[ab]", "[^a]", "[]a]", "[^]a]", "[a-c_]", r"[\]x]", r"\x41",
    "^", "$", r"\b", r"\A", r"\Z", "{", "}", "a{", "x{,y", " ",
])  # fmt: skip
REPEATS = st.sampled_from(
    ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{,2}", "{2,}", "{,}", "{0}", "{1,2}?"]
)
PATTERNS = st.recursive(
    PARTS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.tuples(inner, inner).map("({0[0]}|{0[1]})".format),
        st.tuples(inner, REPEATS).map("(?:{0[0]}){0[1]}".format),
        inner.map("(?P<name>{})".format),
    ),
    max_leaves=6,
)


@given(PATTERNS, st.lists(st.text("abAB_ .1{}x]", min_size=1, max_size=7), min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_it_finds_what_pythons_matcher_finds(pattern, texts) -> None:
    try:
        expected = re.compile(pattern, re.IGNORECASE)
    except re.error:  # two groups of a name
        return
    found = Pattern([pattern])
    assert [found.search(text) for text in texts] == [
        expected.search(text) is not None for text in texts
    ]


def test_any_of_several_may_match_anywhere_in_any_case() -> None:
    found = Pattern(["my_all_?reduce", "deep_ep::(one|two)shot", r"^ring_\d+"])
    names = [
        "f<My_AllReduce>",
        "x deep_ep::TWOshot<8>",
        "ring_12",
        "my_ring_12",
        "deep_ep::layout",
        "",
    ]
    assert [found.search(name) for name in names] == [True, True, True, False, False, False]
    assert not Pattern([]).search("anything")


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "is no regular expression"),
        ("a**", "is no regular expression"),
        ("(" * 5000 + ")" * 5000, "no regular expression|too many brackets"),
        ("(?i)a", r"'\(\?i\)a' cannot be parsed at '\(\?i\)a'"),
        ("a(?!b)", r"cannot be parsed at '\(\?!b\)'"),
        ("(?<=b)a", "cannot be parsed"),
        (r"(a)\1", r"cannot be parsed at '\\\\1'"),
        ("(?P<n>a)(?P=n)", r"cannot be parsed at '\(\?P=n'"),
        ("a{999}b{9}", "the patterns are too long.* more than 1000 parts in total"),
        ("(?:(?:a{1,99}){1,99}){1,99}", "the patterns are too long"),
        (COMMUNICATION_NAMES, r"cannot be parsed at '\(\?<!\['"),
    ],
)
def test_what_is_not_understood_is_told(pattern, why) -> None:
    with pytest.raises(ValueError, match=why):
        Pattern(["nccl", pattern])


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        *(
            (each, "a" * 20_000 + "!")
            for each in ("(a+)+$", "(a|a)*b", "(a*)*b", "a?" * 40 + "a" * 40 + "b", "(.*)*x")
        ),
        ("(a|b)*a.{50}b$", "abba" * 5_000 + "!"),
    ],
)
def test_a_pattern_with_many_ways_takes_no_more_time(pattern, text) -> None:
    found, began = Pattern([pattern]), time.process_time()
    assert not found.search(text)
    assert time.process_time() - began < 10
