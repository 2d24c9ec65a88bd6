"""TOML files within bounds: tomllib itself takes any size, and quadratic time for a key of very many parts."""

import re
from pathlib import Path
from typing import Any

from diag.core.files import read_text
from diag.core.formatting import printable

MOST_BYTES = 2**20
MOST_PARTS = 32
"""Of one key, and how deep tables and lists may be nested."""
_LARGEST = 2**63
_LONG_KEY = re.compile(rf"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){{{MOST_PARTS}}}")


def load(file: Path) -> tuple[str, dict[str, Any]]:
    """The text of a file and its tables; OSError where it cannot be read, ValueError where it is no (bounded) TOML."""
    import tomllib  # noqa: PLC0415  # most runs read no such file

    text = read_text(file, MOST_BYTES, piped=True)
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {MOST_PARTS} parts")
    try:
        tables = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {MOST_PARTS} deep") from error
    except ValueError as error:
        raise ValueError(printable(str(error))) from error
    _check(tables, MOST_PARTS)
    return text, tables


def _check(value: object, deeper: int) -> None:
    """ValueError for what TOML itself leaves to its readers: whole numbers of more than 64 bits, and the depth."""
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise ValueError("it has a whole number of more than 64 bits")
    if not deeper:
        raise ValueError(f"it is nested more than {MOST_PARTS} deep")
    for inside in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check(inside, deeper - 1)
