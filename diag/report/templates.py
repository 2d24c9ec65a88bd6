"""The templates beside this file: every printed value that is not markup is escaped, control characters too."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from diag.core.formatting import escaped, pasted
from diag.report.spans import spans


@cache
def environment() -> Environment:
    loaded = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else escaped(str(value)),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    loaded.filters["pasted"] = lambda command: Markup("{}").format(pasted(command))
    loaded.filters["pixels"] = pixels
    loaded.globals["spans"] = spans
    return loaded


def shape(name: str, *values: object) -> Markup:
    """Draw a shape of a plot, a macro of shapes.svg.j2."""
    return Markup(getattr(_shapes(), name)(*values))


@cache
def _shapes() -> object:
    return environment().get_template("shapes.svg.j2").module


def pixels(length: float) -> str:
    """Format a length with four significant digits."""
    return f"{length:.4g}"
