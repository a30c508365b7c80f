"""Templates: values are data, what is missing is an error, assets stand as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import DictLoader, UndefinedError

import instrument
from instrument.read.views.templates import _environment

ROOT = Path(instrument.__file__).parent


def rendered(source: str, **values: object) -> str:
    """What a template with this text gives."""
    environment = _environment().overlay(loader=DictLoader({"made.txt": source}))
    return environment.get_template("made.txt").render(values)


def test_values_are_data_in_every_kind_of_template() -> None:
    evil = "</script>\x1b[2J\"'<b>&\n\u202e\udc80"
    shown = "&lt;/script&gt;\\x1b[2J&#34;&#39;&lt;b&gt;&amp;\\n\\u202e\\udc80"
    assert rendered("{{ evil }}", evil=evil) == shown
    assert rendered("{% macro m(x) %}{{ x }}{% endmacro %}{{ m(evil) }}", evil=evil) == shown
    assert rendered("{{ evil ~ 1 }}", evil="<") == "&lt;1"


def test_coordinates_are_short() -> None:
    numbers = [0.0, 12.0, 1234567.5, 1 / 3, 7, True, None]
    assert rendered(
        "{{ n | join(' ') }}", n=[rendered("{{ n }}", n=number) for number in numbers]
    ) == ("0 12 1234567.5 0.333 7 True None")


def test_what_is_not_given_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'nothing' is undefined"):
        rendered("{{ nothing }}")


def test_an_asset_stands_as_it_is() -> None:
    assets = [
        file
        for folder in ("read/show", "fx")
        for kind in ("css", "js")
        for file in ROOT.glob(f"{folder}/**/*.{kind}")
    ]
    assert assets
    for file in assets:
        text = file.read_text(encoding="utf-8")
        found = rendered("{{ asset(name) }}", name=file.relative_to(ROOT).as_posix()).rstrip()
        assert found == text.rstrip()
        assert "</" not in text, "it would end the element that contains it"


def test_a_script_is_let_run_by_its_hash() -> None:
    found = rendered("{{ 'alert(1)' | csp_hash }}")
    assert found == "sha256-bhHHL3z2vDgxUt0W3dWQOrprscmda2Y5pLsLg4GF+pI="
