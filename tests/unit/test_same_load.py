"""Comparison of the offered load of two observations: differences that the server's speed explains, and others."""

from dataclasses import replace

import pytest

from diag.verify.load import Lengths, Load, differences

PROMPTS = Lengths(300.0, 10.0, 1200.0, ((200.0, 180.0), (1000.0, 60.0)))
OUTPUTS = Lengths(100.0, 5.0, 400.0, ((200.0, 240.0),))
LOAD = Load(20.0, 20.0, 4.0, 240.0, PROMPTS, OUTPUTS, 60.0)
CLOSED = replace(LOAD, variance=0.2)


def short_and_long(mean: float, short: float, long: float, error: float = 10.0) -> Lengths:
    """Prompts of which so many were short and so many long."""
    return Lengths(mean, error, 700.0, ((200.0, short), (1000.0, long)))


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(replace(LOAD, in_flight=3.0), id="open loop, a faster server"),
        pytest.param(replace(LOAD, in_flight=60.0), id="open loop, a slower server"),
        pytest.param(replace(LOAD, in_flight=5.0, arrivals=9.0), id="clients that pause send more to a faster server"),
        pytest.param(replace(LOAD, in_flight=60.0, arrivals=2.0), id="and fewer to a slower one"),
        pytest.param(
            replace(LOAD, in_flight=3.0, prompts=short_and_long(500.0, 180, 150)),
            id="long prompts that finish now: none rarer on a faster server",
        ),
        pytest.param(
            replace(LOAD, in_flight=60.0, prompts=short_and_long(150.0, 180, 20)),
            id="long prompts that no longer finish: none more frequent on a slower server",
        ),
    ],
)
def test_difference_explained_by_the_server_is_the_same_load(after: Load) -> None:
    assert not list(differences(LOAD, after))


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        pytest.param(
            replace(LOAD, in_flight=8.0, arrivals=2.0),
            "the load differs: arrivals 4 -> 2 per second, and requests in flight with them 20 -> 8",
            id="half of the arrivals",
        ),
        pytest.param(
            replace(LOAD, in_flight=50.0, arrivals=9.0),
            "the load differs: arrivals 4 -> 9 per second, and requests in flight with them 20 -> 50",
            id="more of both",
        ),
        pytest.param(
            replace(LOAD, prompts=short_and_long(600.0, 90, 150)),
            "prompt lengths differ: mean 300 (± 10) -> 600 (± 10) tokens",
            id="longer prompts on a server of the same pace",
        ),
        pytest.param(
            replace(LOAD, in_flight=3.0, prompts=short_and_long(600.0, 90, 150)),
            "prompt lengths differ: mean 300 (± 10) -> 600 (± 10) tokens",
            id="short prompts became rarer, which a faster server does not explain",
        ),
        pytest.param(
            replace(LOAD, in_flight=60.0, prompts=short_and_long(600.0, 60, 150)),
            "prompt lengths differ: mean 300 (± 10) -> 600 (± 10) tokens",
            id="long prompts became more frequent, which a slower server does not explain",
        ),
        pytest.param(
            replace(LOAD, in_flight=3.0, prompts=replace(short_and_long(600.0, 0, 0), counts=())),
            "prompt lengths differ: mean 300 (± 10) -> 600 (± 10) tokens",
            id="nothing known of each length",
        ),
        pytest.param(
            replace(LOAD, outputs=Lengths(160.0, 5.0, 900.0, ((200.0, 240.0),))),
            "output lengths differ: mean 100 (± 5) -> 160 (± 5) tokens",
            id="longer outputs",
        ),
        pytest.param(
            replace(LOAD, finished=2.0), "only 2 requests finished after the change", id="nothing happened after"
        ),
        pytest.param(replace(LOAD, in_flight=3.0, arrivals=None), "arrivals 4 -> - per second", id="one scrape"),
    ],
)
def test_different_load_is_reported_with_its_numbers(after: Load, sentence: str) -> None:
    (told,) = differences(LOAD, after)
    assert sentence in told


@pytest.mark.parametrize(
    ("after", "same"),
    [
        pytest.param(replace(CLOSED, arrivals=9.0), True, id="whatever their rate"),
        pytest.param(replace(CLOSED, in_flight=10.0), False, id="half of them get the same rate from a busy server"),
        pytest.param(replace(LOAD, in_flight=3.0), False, id="and the fewer they are the less flat"),
        pytest.param(replace(CLOSED, in_flight=10.0, arrivals=9.0), False, id="half of them on a faster server"),
        pytest.param(replace(CLOSED, in_flight=40.0), False, id="twice as many"),
    ],
)
def test_closed_loop_clients_are_as_many_as_are_in_flight(after: Load, same: bool) -> None:
    assert (not list(differences(CLOSED, after))) is same


def test_a_long_queue_of_clients_that_do_not_wait_is_flat_and_no_closed_loop() -> None:
    """300 that vary by four, while as many changes come from scrape to scrape as requests come and go."""
    queue = replace(LOAD, in_flight=300.0, variance=16.0, steps=0.6)
    assert not list(differences(queue, replace(LOAD, in_flight=3.0)))
    assert list(differences(replace(queue, steps=0.1), replace(LOAD, in_flight=3.0)))


@pytest.mark.parametrize(("in_flight", "same"), [(14.0, True), (7.0, False)])
def test_closed_loop_clients_that_pause_have_fewer_requests_on_a_faster_server(in_flight: float, same: bool) -> None:
    """20 with a request in flight and 1.9 pausing are 14 and 7.6 where requests come four times as fast."""
    before = replace(LOAD, variance=1.9)
    assert (not list(differences(before, replace(before, in_flight=in_flight, arrivals=16.0)))) is same


def test_a_gateway_limit_that_is_the_change_excuses_the_amount_and_not_the_lengths() -> None:
    held = replace(CLOSED, in_flight=6.0, arrivals=2.0)
    assert not list(differences(CLOSED, held, limited=True))
    other = replace(held, prompts=short_and_long(600.0, 60, 90))
    assert "prompt lengths differ" in next(differences(CLOSED, other, limited=True))


@pytest.mark.parametrize(("seconds", "chance"), [(6.0, True), (60.0, False)])
def test_few_arrivals_do_not_distinguish_rates(seconds: float, chance: bool) -> None:
    """24 requests and then 12 may be one rate, 240 and then 120 may not."""
    before = replace(LOAD, seconds=seconds)
    (told,) = differences(before, replace(before, in_flight=8.0, arrivals=2.0))
    assert ("too few requests arrived to tell" in told) is chance


def test_a_mean_of_few_requests_is_known_within_its_standard_error() -> None:
    few = replace(LOAD, prompts=short_and_long(240.0, 20, 6, error=70.0))
    other = replace(few, prompts=short_and_long(400.0, 16, 14, error=65.0))
    assert not list(differences(few, other))


def test_lengths_are_the_same_where_the_longest_and_the_tokens_per_second_are() -> None:
    """Short ones among closed-loop clients come more often once a fix unblocks them."""
    unblocked = Lengths(140.0, 10.0, 1100.0, ((200.0, 500.0), (1000.0, 60.0)))
    assert not list(differences(LOAD, replace(LOAD, prompts=unblocked)))
    shorter = replace(unblocked, counts=((200.0, 500.0), (1000.0, 0.0)))
    assert list(differences(LOAD, replace(LOAD, prompts=shorter)))


@pytest.mark.parametrize("before", [replace(LOAD, in_flight=8.0, idle=0.8), replace(LOAD, in_flight=60.0)])
def test_mostly_idle_snapshot_is_reported(before: Load) -> None:
    after = replace(before, in_flight=20.0, arrivals=9.0) if before.idle else replace(LOAD, arrivals=2.0, idle=0.8)
    (told,) = differences(before, after)
    side = "BEFORE" if before.idle else "AFTER"
    assert told.startswith(f"{side} was mostly idle, without a request in flight in 80 % of its scrapes")


def test_unmeasured_load_is_reported() -> None:
    """One that never served has no load to compare; one that did, and without these numbers, has one nobody knows."""
    assert not list(differences(replace(LOAD, in_flight=None, responded=False), replace(LOAD, finished=0.0)))
    assert "not measured" in next(differences(replace(LOAD, in_flight=None), LOAD))


def test_a_server_that_stalled_all_the_time_has_no_lengths_to_compare() -> None:
    stalled = replace(LOAD, finished=0.0, arrivals=0.0, prompts=Lengths(), outputs=Lengths())
    assert not list(differences(stalled, LOAD))
