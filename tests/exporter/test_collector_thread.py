"""A collector runs one collection at a time; one that hangs or raises costs only its part of the page."""

import gc
import threading
import time

from diag.exporter.page import CollectorThread
from diag.exporter.vllm_page import CollectorFailed

LONG = 30.0
"""Seconds that nothing here takes, unless it is broken."""


def test_collection_yields_its_value_and_duration() -> None:
    result = CollectorThread("p", lambda: 3).collect().result(LONG)
    assert (result.value, result.problem) == (3, "")
    assert 0 <= result.seconds < LONG


def test_scrapes_at_the_same_time_share_a_collection() -> None:
    go_on, collections = threading.Event(), []

    def collect() -> int:
        collections.append(1)
        go_on.wait(LONG)
        return len(collections)

    thread = CollectorThread("p", collect)
    first, second = thread.collect(), thread.collect()
    go_on.set()
    assert first.result(LONG).value == second.result(LONG).value == 1
    assert thread.collect().result(LONG).value == 2


def test_a_collection_that_hangs_is_reported_and_holds_up_the_first_scrape_only() -> None:
    go_on = threading.Event()
    thread, begun = CollectorThread("hangs", lambda: go_on.wait(LONG)), time.monotonic()
    for _ in range(300):
        result = thread.collect().result(0.2)
        assert (result.value, result.problem) == (None, "takes longer than a scrape may")
    assert time.monotonic() - begun < 300 * 0.2 / 3
    assert [each.name for each in threading.enumerate()].count("diag-hangs") == 1
    go_on.set()


def test_collector_recovers_after_a_hang() -> None:
    go_on = threading.Event()
    thread = CollectorThread("p", lambda: go_on.wait(LONG))
    hung = thread.collect()
    assert hung.result(0.05).problem
    go_on.set()
    assert hung.future.result(LONG).value is True
    assert thread.collect().result(LONG).value is True


def test_an_error_is_a_problem_and_the_next_collection_is_made_all_the_same() -> None:
    answers = iter([ValueError("broken"), CollectorFailed("no driver here"), None])

    def collect() -> str:
        error = next(answers)
        if error:
            raise error
        return "fine"

    thread = CollectorThread("p", collect)
    assert thread.collect().result(LONG).problem == "ValueError: broken"
    assert thread.collect().result(LONG).problem == "no driver here"
    assert thread.collect().result(LONG).value == "fine"


def test_collector_thread_ends_with_the_collector() -> None:
    """A watch makes new ones again and again."""
    collector = CollectorThread("ends-with-it", lambda: 1)
    collector.collect().result(LONG)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "diag-ends-with-it"]
    del collector
    gc.collect()
    thread.join(LONG)
    assert not thread.is_alive()
