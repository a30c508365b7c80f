from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from instrument.names import from_trace, to_trace


@given(st.text(st.characters()))
@example('head "a"')
@example("100% of größe")
@example("utf8:a%C3%B6b")
@example("%")
@example("lone \udce9 surrogate")
@example("tab\t, newline\n, null\x00, back\\slash")
def test_every_name_comes_back_and_travels_in_plain_characters(name: str) -> None:
    there = to_trace(name)
    assert there.isascii()
    assert there.isprintable()
    assert not set('"\\') & set(there)
    assert from_trace(there) == name


def test_names_of_other_people_stay_as_they_are() -> None:
    for name in ("https://x.org/a%20b", "50%", "%zz", "aten::mm", "100%AB", "utf8"):
        assert from_trace(name) == name
