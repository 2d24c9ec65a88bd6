"""Notes for the reader about the scrapes themselves."""

import pytest

from diag.exposition.scrapes import Target
from diag.sources.observation import scrape_notes

NOON = 1_795_262_400_000


def said(*pages: bytes | str) -> list[str]:
    """The notes about scrapes every 5 s; a text is the reason of a failed one."""
    target = Target("h:1")
    for number, page in enumerate(pages):
        at = NOON + 5000 * number
        target.fail(at, page) if isinstance(page, str) else target.add(at, page)
    return list(scrape_notes(target.table()))


def counter(value: int, start: float | None = 100.0) -> bytes:
    began = f"process_start_time_seconds {start}\n" if start else ""
    return f'vllm:prompt_tokens_total{{model_name="a"}} {value}\n{began}'.encode()


def test_clean_observation_has_no_notes() -> None:
    assert said(counter(1), counter(2), counter(2)) == []


@pytest.mark.parametrize(
    ("pages", "note"),
    [
        ((b"x 1\n", "refused", "refused"), "2 of 3 scrapes of h:1 failed: refused (from 12:00:05 UTC on)"),
        ((b"x 1\n", "refused", b"x 1\n"), "1 of 3 scrapes of h:1 failed: refused (at 12:00:05 UTC)"),
        (("refused", "refused", b"x 1\n"), "2 of 3 scrapes of h:1 failed: refused (from 12:00:00 UTC to 12:00:05 UTC)"),
        (
            ("refused", b"x 1\n", "refused", b"x 1\n"),
            "2 of 4 scrapes of h:1 failed: refused (intermittently from 12:00:00 UTC to 12:00:10 UTC)",
        ),
        (("refused",), "1 of 1 scrape of h:1 failed: refused (all of them)"),
        ((b"x 1\n", "a", "b", "b"), "3 of 4 scrapes of h:1 failed: b (2), a (1) (from 12:00:05 UTC on)"),
        ((b"x 1\n", "\x1b[2Jred"), "1 of 2 scrapes of h:1 failed: \\x1b[2Jred (at 12:00:05 UTC)"),
    ],
)
def test_failed_scrapes_are_counted_with_reason_and_time(pages: tuple[bytes | str, ...], note: str) -> None:
    assert said(*pages) == [note]


def test_a_restart_shows_in_the_start_time() -> None:
    assert said(counter(5), counter(6), counter(1, start=200.0)) == [
        "h:1 restarted at 12:00:10 UTC (process_start_time_seconds changed)"
    ]


def test_a_restart_is_seen_across_failed_scrapes() -> None:
    assert "h:1 restarted at 12:00:10 UTC (process_start_time_seconds changed)" in said(
        counter(5), "refused", counter(1, start=200.0)
    )


def test_without_a_start_time_falling_counters_are_a_restart() -> None:
    assert said(counter(5, None), counter(1, None)) == ["h:1 restarted at 12:00:05 UTC (counters decreased)"]


def test_falling_counters_without_a_restart_are_noted() -> None:
    assert said(counter(5), counter(1)) == ["counters of h:1 decreased at 12:00:05 UTC without a restart"]


def test_a_start_time_that_goes_back_is_two_servers() -> None:
    pages = [counter(5), counter(1, start=50.0), counter(6)]
    assert said(*pages) == [
        "more than one server answers at h:1 (the process start time alternates): scrape each by its own address"
    ]


def test_change_of_the_model_is_noted() -> None:
    assert said(counter(5), counter(6).replace(b'"a"', b'"b"')) == [
        "the served model of h:1 changed from a to b at 12:00:05 UTC"
    ]


def test_a_model_with_a_terminal_escape_in_its_name_is_fit_to_print() -> None:
    assert said(counter(5), counter(6).replace(b'"a"', b'"\x1b]0;b\x07"')) == [
        "the served model of h:1 changed from a to \\x1b]0;b\\x07 at 12:00:05 UTC"
    ]


@pytest.mark.parametrize(
    ("page", "note"),
    [
        (b"x 1\n<b>\n", "contained invalid lines, which were skipped; the first: line 2 is not a metric: <b>"),
        (b"x 1\nx 2\n", "repeated series (for example x): one with several values counts as missing"),
        (b"x 1 99\n", "contained timestamps: the scrape times were used instead"),
        (b"x 1\ny 2", "ended in the middle of a line: the rest counts as missing"),
    ],
)
def test_flaw_of_several_pages_is_noted_once(page: bytes, note: str) -> None:
    assert said(b"x 1\n", page, page, "refused")[1:] == [f"2 of 3 pages of h:1 {note}"]
