"""Values are written with the units that people use, and never with an exponent."""

import re

import pytest
from support.rows import each_row

import diag.signals
from diag.core.formatting import clock, moment, quantity, threshold
from diag.core.incident import Signal

FORMATTED = {"share", "seconds", "bytes", "celsius", "watts", "bool", "unix time", "PID", "HTTP status"}
COUNTED = {
    *("requests", "tokens", "blocks", "pauses", "drafts", "adapters", "cores", "processes", "probes", "settings"),
    *("GPUs", "faults", "links", "ranks", "stages", "engines", "replicas", "crashes", "lines", "names", "transfers"),
    *("answers", "calls", "errors", "parts", "ports", "servers", "GiB", "items", "generations"),
}
SIGNALS = {name: value for name, value in vars(diag.signals).items() if isinstance(value, Signal)}


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (0.074, "share", "7.4 %"),
        (1, "share", "100 %"),
        (0, "share", "0 %"),
        (0.000001, "share", "<0.001 %"),
        (0.085, "seconds", "85 ms"),
        (42, "seconds", "42 s"),
        (150, "seconds", "2.5 min"),
        (17.9 * 2**30, "bytes", "17.9 GiB"),
        (4.5, "celsius", "4.5 °C"),
        (66.5, "watts", "66.5 W"),
        (1, "bool", "yes"),
        (0, "bool", "no"),
        (1.333, "ratio", "1.33"),
        (1234567, "tokens", "1,234,567"),
    ],
)
def test_value_is_printed_with_its_unit(value: float, unit: str, written: str) -> None:
    assert quantity(value, unit) == written


@pytest.mark.parametrize("unit", sorted(FORMATTED | {"ratio", "tokens"}))
def test_no_value_is_written_with_an_exponent(unit: str) -> None:
    values = [sign * digit * 10.0**power for sign in (1, -1) for digit in (1, 9.996) for power in range(-12, 16)]
    assert [value for value in values if "e+" in quantity(value, unit) or "e-" in quantity(value, unit)] == []


@pytest.mark.parametrize(
    ("comparison", "limit", "unit", "written"),
    [
        (">", 0.9, "share", "> 90 %"),
        ("<=", 4, "requests", "<= 4"),
        (">=", 1, "bool", "= yes"),
        ("<=", 0, "bool", "= no"),
    ],
)
def test_a_threshold_is_written_like_its_value(comparison: str, limit: float, unit: str, written: str) -> None:
    assert threshold(comparison, limit, unit) == written


@each_row("name", sorted(SIGNALS))
def test_every_signal_has_a_known_unit(name: str) -> None:
    assert SIGNALS[name].unit in FORMATTED | COUNTED | {"ratio", "1/s", "level"}
    assert not re.search(r"{value} (s|W|C|bytes)\b", SIGNALS[name].sentence)


def test_a_span_has_the_date_once_and_a_second_time_after_midnight() -> None:
    start = 1_784_000_000.0
    assert moment.span(start, start + 60) == "2026-07-14 03:33:20 - 03:34:20 UTC"
    assert moment.span(start, start + 86_400) == "2026-07-14 03:33:20 - 2026-07-15 03:33:20 UTC"
    assert clock.span(start, start + 60) == "03:33:20 - 03:34:20 UTC"
