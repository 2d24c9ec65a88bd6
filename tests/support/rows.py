"""Tests of a whole table: one test for all of its rows, which lists every bad one.

A parametrised test costs 2 ms of CPU for each row before it has looked at one, and each process collects all of them.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest

Test = Callable[..., None]


def each_row(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Call the test with every row, like `pytest.mark.parametrize`; fail once, with each row that fails and its reason.

    For tests that only compute: what a fixture of one test undoes at its end is undone after the last row.
    """
    taken = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    cases = [row.values if hasattr(row, "values") and hasattr(row, "marks") else row for row in rows]
    told = [row if isinstance(row, tuple) and (len(taken) > 1 or len(row) == 1) else (row,) for row in cases]
    assert told and all(len(row) == len(taken) for row in told), "a test without rows shows nothing"

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)

        @wraps(test)
        def every_row(*self: Any, **fixtures: Any) -> None:
            failed = []
            for row in told:
                try:
                    test(*self, **fixtures, **dict(zip(taken, row, strict=True)))
                except (AssertionError, pytest.fail.Exception) as error:
                    failed.append(f"{', '.join(map(_shown, row))}: {error}")
                except Exception as error:
                    error.add_note(f"in the row {', '.join(map(_shown, row))}; failed before it: {failed}")
                    raise
            assert not failed, f"{len(failed)} of {len(told)} rows fail:\n" + "\n".join(failed)

        others = [each for name, each in signature.parameters.items() if name not in taken]
        every_row.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return every_row

    return decorate


def _shown(value: Any) -> str:
    """The start of a value, by its id if it has one."""
    return str(getattr(value, "id", None) or repr(value))[:120]
