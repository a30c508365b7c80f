from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from instrument.base.range_names import from_trace, shown, to_trace


@given(st.text(st.characters()))
@example('head "a"')
@example("100% of größe")
@example("utf8:a%C3%B6b")
@example("%")
@example("lone \udce9 surrogate")
@example("ProfilerStep#3")
@example("tab\t, newline\n, null\x00, back\\slash")
def test_every_name_comes_back_whole_and_travels_in_plain_characters(name: str) -> None:
    there = to_trace(name)
    assert there.isascii()
    assert there.isprintable()
    assert not set('"\\') & set(there)
    assert from_trace(there) == name.encode("utf-8", "backslashreplace").decode()


def test_names_of_other_people_stay_as_they_are() -> None:
    for name in ("https://x.org/a%20b", "50%", "%zz", "aten::mm", "100%AB", "utf8"):
        assert from_trace(name) == name


def test_half_a_character_of_other_people_is_replaced() -> None:
    assert from_trace("utf8:a%ED%A0%80b") == "a\ufffd\ufffd\ufffdb"


def test_a_range_that_is_called_like_a_step_is_shown_in_quotes() -> None:
    assert to_trace("ProfilerStep#3") != "ProfilerStep#3"
    assert shown(to_trace("ProfilerStep#3")) == "'ProfilerStep#3'"
    assert shown("ProfilerStep#3") == "ProfilerStep#3", "of whatever profiler wrote the trace"
    assert shown(to_trace("größe")) == "größe"
