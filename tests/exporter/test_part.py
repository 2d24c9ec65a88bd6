"""A part of the page is looked at once at a time; one that hangs or raises costs only itself."""

import gc
import threading
import time

from diag.exporter.part import PagePart, Unusable


def test_a_look_gives_what_it_found_and_how_long_it_took() -> None:
    outcome = PagePart("p", lambda: 3).look().outcome(1)
    assert (outcome.result, outcome.problem) == (3, "")
    assert 0 <= outcome.seconds < 1


def test_scrapes_at_the_same_time_share_a_look() -> None:
    going, looks = threading.Event(), []

    def look() -> int:
        looks.append(1)
        going.wait(5)
        return len(looks)

    part = PagePart("p", look)
    first, second = part.look(), part.look()
    going.set()
    assert first.outcome(5).result == second.outcome(5).result == 1
    assert part.look().outcome(5).result == 2


def test_a_look_that_hangs_is_said_and_holds_up_the_first_scrape_only() -> None:
    going = threading.Event()
    part = PagePart("p", lambda: going.wait(5))
    assert part.look().outcome(0.2).problem == "takes longer than a scrape may"
    begun = time.monotonic()
    assert part.look().outcome(0.2).result is None
    assert time.monotonic() - begun < 0.1
    going.set()


def test_a_look_that_hung_comes_back() -> None:
    going = threading.Event()
    part = PagePart("p", lambda: going.wait(5))
    part.look().outcome(0.05)
    going.set()
    time.sleep(0.1)
    assert part.look().outcome(1).result is True


def test_an_error_is_a_problem_and_the_next_look_is_made_all_the_same() -> None:
    answers = iter([ValueError("broken"), Unusable("no driver here"), None])

    def look() -> str:
        error = next(answers)
        if error:
            raise error
        return "fine"

    part = PagePart("p", look)
    assert part.look().outcome(1).problem == "ValueError: broken"
    assert part.look().outcome(1).problem == "no driver here"
    assert part.look().outcome(1).result == "fine"


def test_a_hundred_scrapes_of_a_part_that_hangs_make_no_more_threads() -> None:
    going = threading.Event()
    part = PagePart("p", lambda: going.wait(5))
    before = threading.active_count()
    for _ in range(100):
        part.look().outcome(0)
    assert threading.active_count() == before
    going.set()


def test_its_thread_ends_with_the_part() -> None:
    """A watch makes new ones for every look."""
    part = PagePart("of-a-look", lambda: 1)
    part.look().outcome(5)
    (thread,) = [each for each in threading.enumerate() if each.name == "diag-of-a-look"]
    del part
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
