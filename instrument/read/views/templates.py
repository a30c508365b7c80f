"""Renders HTML from the templates in this package.

Templates and assets (CSS and JavaScript) are files. They are named by their path in the package,
such as `read/show/templates/report.html`. A page contains its CSS and JavaScript and loads no other
file.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from instrument.base.printable import printable

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: Any) -> str:
    """Fill a template with values.

    Values are escaped for HTML, and unprintable characters are shown as escapes. A value with a
    method `__html__` is not escaped: its HTML is inserted. Floats are rounded to three decimals,
    because templates use them as coordinates.

    Raises:
        jinja2.UndefinedError: the template uses a name that is not in `values`.
    """
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    # Imported here because most runs render no template.
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("instrument", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        finalize=_finalize,
    )
    loader = environment.loader
    assert loader is not None
    environment.globals["asset"] = lambda path: Markup(loader.get_source(environment, path)[0])
    environment.filters["csp_hash"] = _csp_hash
    return environment


def _finalize(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _csp_hash(script: str) -> str:
    """The hash with which a page's Content-Security-Policy allows a script."""
    return f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}"
