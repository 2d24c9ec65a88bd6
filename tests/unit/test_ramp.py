"""The parts of `diag ramp` that run nothing: the next load, when it is enough, the ceiling, what other tools say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diag.core.contract import Contract
from diag.core.errors import BadUsage
from diag.ramp import results
from diag.ramp.analysis import Circumstances, compared, conclude, gain_per_doubling
from diag.ramp.plan import Limits, ceiling, next_offer, prompts, requests_for_repeat, why_enough, why_unusable
from diag.ramp.results import Offer
from diag.ramp.run import environment
from diag.ramp.step import Counted, Failures, Latency, Step, steady_part, step_from_client

LIMITS = Limits(Contract(ttft_seconds=5.0), seconds=30.0, most=64)
DATA = Path(__file__).parent.parent / "data" / "load_tools"


def closed(concurrency: int, rate: float, ttft: float = 0.1, **more: Any) -> Step:
    """A step that kept so many requests in flight, with 100 tokens each way."""
    given = {"in_flight": float(concurrency), "waiting": 0.0, "tokens_per_step": float(concurrency), **more}
    latency = Latency(ttft, ttft, ttft, 30 * rate, 0.0)
    return Step(Offer(concurrency=concurrency), 30.0, 30 * rate, rate, 100 * rate, 100 * rate, ttft=latency, **given)


def poisson(rate: float, growth: float = 0.0, ttft: float = 0.1) -> Step:
    latency = Latency(ttft, ttft, ttft, 30 * rate, 0.0)
    return Step(Offer(rate=rate), 30.0, 30 * rate, rate, 100 * rate, 100 * rate, growth=growth, ttft=latency)


def offers(*steps: Step) -> Offer | None:
    return next_offer(steps, LIMITS)


def test_ramp_doubles_the_load_until_throughput_stops_rising() -> None:
    steps = [closed(1, 1), closed(2, 2), closed(4, 4)]
    assert offers() == Offer(concurrency=1)
    assert [next_offer(steps[:at], LIMITS) for at in (1, 2, 3)] == [Offer(2), Offer(4), Offer(8)]
    flat = [*steps, closed(8, 4.2), closed(16, 4.3)]
    assert why_enough(flat, LIMITS) == "requests/s did not rise over two doublings"
    assert offers(*flat) == Offer(rate=3.87)


def test_ramp_ends_on_an_slo_violation_that_is_not_chance() -> None:
    late = Latency(1, 6, 6, 90, 0.1)
    assert "TTFT is above 5 s for 10 % of the requests" in why_enough([closed(1, 3)._replace(ttft=late)], LIMITS)
    assert not why_enough([closed(1, 3)._replace(ttft=late._replace(observed=20))], LIMITS), "two late ones"
    refused = closed(1, 3)._replace(failures=Failures(5, 100, "server"))
    assert why_enough([refused], LIMITS) == "5 % of the answers are HTTP errors (4xx or 5xx)"
    counted = closed(1, 3)._replace(failures=Failures(5, 100, "client"))
    assert why_enough([counted], LIMITS) == "5 % of the requests failed, as the load generator counts"
    assert not why_enough([closed(1, 3)._replace(failures=Failures(2, 20, "server"))], LIMITS), "two may be chance"


def test_ramp_ends_if_only_ttft_and_concurrency_rise() -> None:
    steps = [closed(8, 4, ttft=2.0), closed(16, 4.1, ttft=4.0)]
    assert why_enough(steps, LIMITS) == "median TTFT is 4 s and only rises with the concurrency"
    assert not why_enough([steps[0], closed(16, 7, ttft=4.0)], LIMITS), "more is served"


def test_ramp_ends_at_the_highest_allowed_concurrency() -> None:
    assert "64 requests at a time" in why_enough([closed(64, 64)], LIMITS)
    assert offers(closed(48, 48)) == Offer(concurrency=64)


def test_ramp_ends_with_a_slow_client_as_the_binding_resource() -> None:
    steps = [closed(8, 2.9), closed(16, 3)._replace(in_flight=6.0)]
    assert why_enough([closed(8, 1), steps[1]], LIMITS) == "", "it still serves more"
    assert why_enough(steps, LIMITS) == "fewer requests are in flight than were offered, and none waits"
    assert offers(*steps) is None, "no open-loop step either"
    short = steps[1]._replace(seconds=5.0)
    assert why_enough([steps[0], short], LIMITS) == "", "it was over before all were in flight"
    waits = steps[1]._replace(waiting=4.0)
    assert "offered" not in why_enough([steps[0], waits], LIMITS), "the server makes them wait"


def test_open_loop_steps_bracket_the_ceiling() -> None:
    steps = [closed(1, 1), closed(2, 2), closed(4, 2), closed(8, 2)]
    assert offers(*steps) == Offer(rate=1.8)
    assert offers(*steps, poisson(1.8)) == Offer(rate=2.07)
    assert offers(*steps, poisson(1.8, growth=0.4)) == Offer(rate=1.44)
    three = LIMITS._replace(brackets=3)
    assert next_offer([*steps, poisson(1.8), poisson(2.07, growth=0.4)], three) == Offer(rate=1.94)
    assert offers(*steps, poisson(1.8), poisson(2.07)) is None


def test_ceiling_is_the_highest_rate_inside_the_slo() -> None:
    steps = [closed(1, 1), closed(2, 1.9), closed(4, 2), closed(8, 2.1)._replace(ttft=Latency(6, 6, 6, 63, 1.0))]
    found = ceiling(steps, LIMITS)
    assert found
    assert found.knee
    assert (found.step.offer.concurrency, found.knee.offer.concurrency) == (4, 2)
    opened = ceiling([*steps, poisson(1.7), poisson(2.0, growth=0.5)], LIMITS)
    assert opened
    assert opened.step.offer == Offer(rate=1.7), "arrivals are like those of users"
    assert ceiling([closed(1, 1)._replace(seconds=10.0)], LIMITS) is None, "too short to count"
    assert ceiling([closed(1, 0.2)], LIMITS) is None, "too few requests"


def test_a_step_has_as_many_requests_as_its_seconds_need() -> None:
    assert prompts(Offer(concurrency=1), [], 2.0, LIMITS) == 72
    assert prompts(Offer(concurrency=8), [closed(2, 2), closed(4, 4)], 1.0, LIMITS) == 288, "twice the rate so far"
    assert prompts(Offer(concurrency=8), [closed(2, 2), closed(4, 2)], 1.0, LIMITS) == 80, "a rate that no longer rises"
    assert prompts(Offer(concurrency=4), [], 2.0, LIMITS) == 288, "the first step, with four at a time"
    assert prompts(Offer(rate=10.0), [], 1.0, LIMITS) == 360
    assert requests_for_repeat(closed(4, 4), 100, LIMITS) == 0
    assert requests_for_repeat(closed(4, 4)._replace(seconds=9.0), 100, LIMITS) == 500


def counted(in_flight: list[float], finished: list[float], tokens: list[float]) -> Counted:
    """The counters of a step, scraped every second."""
    columns = (np.array(column, float) for column in (in_flight, finished, tokens))
    return Counted(np.arange(float(len(in_flight))), *columns)


def test_steady_part_is_where_all_offered_requests_are_in_flight() -> None:
    """One request alone, eight at a time, and a tail of the last ones that are longer than all others."""
    in_flight = [0.0, 0, 1, *[8] * 13, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]
    finished = [0.0, 0, 0, 1, *[8 * at for at in range(1, 13)], 101, 103, *[103] * 9, 104]
    seen = counted(in_flight, finished, [100 * done for done in finished])
    assert steady_part(seen, 8, generated=True) == slice(5, 16)
    nothing = counted([0.0] * 20, [5.0] * 20, [7.0] * 20)
    failed = counted([np.nan] * 20, [np.nan] * 20, [np.nan] * 20)
    for concurrency, generated in ((8, True), (None, True), (None, False)):
        assert steady_part(nothing, concurrency, generated=generated) == slice(0, 0)
        assert steady_part(failed, concurrency, generated=generated) == slice(0, 0)


def test_steady_part_of_a_closed_loop_with_fewer_requests_is_the_plateau_of_the_tokens() -> None:
    """A client that keeps two of eight requests in flight, or one whose requests are too short for the gauges."""
    rates = [0, 0, 10, *[50] * 14, 10, 10, 0, 0]
    tokens = np.cumsum(rates).tolist()
    for level in (2.0, 0.0):
        in_flight = [level * (rate > 0) for rate in rates]
        finished = [done - held for done, held in zip(np.cumsum(rates), in_flight, strict=True)]
        assert steady_part(counted(in_flight, finished, tokens), 8, generated=True) == slice(5, 17), level


def test_steady_part_of_an_open_loop_ends_with_the_last_arrival() -> None:
    """The queue of a server that does not keep up is longest then, and is drained for as long again."""
    in_flight = [0.0, *range(1, 11), *range(9, -1, -1)]
    finished = [float(at) for at in range(21)]
    assert steady_part(counted(in_flight, finished, finished), None, generated=True) == slice(3, 10)
    assert steady_part(counted(in_flight, [np.nan] * 21, finished), None, generated=True).stop == 21, "no such counter"


def test_load_of_other_clients_has_no_start_and_no_end() -> None:
    in_flight = [0.0, 0, 3, 8, 8, 2, 8, 8, 8, 8, 3, 0]
    seen = counted(in_flight, [10.0 * at for at in range(12)], [100.0 * at for at in range(12)])
    assert steady_part(seen, None, generated=False) == slice(4, 10)


def test_a_short_or_crowded_step_is_repeated_once_and_does_not_count() -> None:
    short = closed(4, 4, scrapes=3, interval=1.0)._replace(seconds=25.0)
    assert requests_for_repeat(short, 100, LIMITS) == 180
    assert why_unusable(short, LIMITS) == (
        "all offered requests were in flight at 3 scrapes, and 4 are needed: the step is too short, give"
        " --step-seconds 60"
    )
    crowded = closed(4, 4, scrapes=25, crowded="a process of vLLM waited")
    assert requests_for_repeat(crowded, 100, LIMITS) == 100
    assert not why_unusable(closed(4, 4, scrapes=4), LIMITS)
    for worthless in (short, crowded):
        assert ceiling([worthless], LIMITS) is None
        assert why_enough([closed(1, 1), closed(2, 1), worthless], LIMITS) == "", "its rate ends no ramp"


def test_the_gain_of_twice_the_tokens_in_a_step() -> None:
    assert gain_per_doubling(closed(4, 4), closed(16, 16)) == pytest.approx(1.0)
    assert gain_per_doubling(closed(4, 4), closed(16, 4)) == pytest.approx(0.0)


def test_a_disturbed_step_is_not_what_a_full_step_serves() -> None:
    """In the last of three steps at a sequence cap of four, a neighbour on the host took half of the throughput."""
    half, full, disturbed = closed(2, 2), closed(8, 4, tokens_per_step=4.0), closed(16, 2, tokens_per_step=4.3)
    assert compared([half, full, disturbed]) == (half, full)
    assert compared([full, disturbed]) is None


def test_binding_resource_is_unknown_without_server_samples() -> None:
    found = conclude([closed(1, 1), closed(2, 2), closed(4, 2)], LIMITS, Circumstances("file"))
    assert found.ceiling
    assert found.binds is None
    assert found.candidates == ()


def test_credentials_reach_the_generator_by_its_environment() -> None:
    given = {"PATH": "/bin", "DIAG_BEARER_TOKEN": "secret"}
    found = environment(given, "Bearer secret", "/ca.pem")
    assert found["OPENAI_API_KEY"] == "secret"
    assert found["SSL_CERT_FILE"] == "/ca.pem"
    assert "DIAG_BEARER_TOKEN" not in found
    with pytest.raises(BadUsage, match="bearer token only"):
        environment(given, "Basic abc", "")


@pytest.mark.parametrize("document", ["[]", "{}", "nan", "<html>", '{"benchmarks": [{}]}', '{"aiperf_version": "1"}'])
def test_file_without_results_is_refused(tmp_path: Path, document: str) -> None:
    file = tmp_path / "result.json"
    file.write_text(document)
    with pytest.raises(BadUsage, match=r"result\.json"):
        results.read([file])
    with pytest.raises(BadUsage, match="cannot be read"):
        results.read([tmp_path / "nothing"])


def test_a_report_of_guidellm_is_read() -> None:
    """The report is from guidellm 0.8.1 (report version 2) against a vLLM on a busy CPU, without single requests."""
    (two, four) = results.read([DATA / "guidellm-0.8.1.json"])
    assert (two[0], four[0]) == (Offer(concurrency=2), Offer(concurrency=4))
    found = four[1]
    assert (found.completed, found.failed) == (12, 0)
    assert found.requests_per_second == pytest.approx(17.8, abs=0.1)
    assert found.ttft.p50 == pytest.approx(0.142, abs=0.001)
    assert found.end - found.start == pytest.approx(found.seconds)
    step = step_from_client(*four, LIMITS.contract)
    assert (step.by, step.in_flight, step.ttft.late) == ("client", 4.0, 0.0)
    assert step_from_client(*two, LIMITS.contract).ttft.late == pytest.approx(0.1), "percentiles above the SLO"


def test_a_result_of_aiperf_is_read() -> None:
    """The result is from AIPerf 0.13.0 (schema 1.4) against the mock server of guidellm 0.8.1."""
    ((offer, found),) = results.read([DATA / "aiperf-0.13.0.json"])
    assert offer == Offer(concurrency=4)
    assert (found.completed, found.failed) == (24, 0)
    assert found.requests_per_second == pytest.approx(11.38, abs=0.01)
    assert found.ttft.p99 == pytest.approx(0.289, abs=0.001)
    assert found.itl.p50 == pytest.approx(0.00189, abs=0.00001)
    assert found.prompt_tokens_per_second == pytest.approx(1536 / 2.089, rel=0.01)


BENCH = {"max_concurrency": 8, "completed": 300, "duration": 30.0, "request_throughput": 10.0, "output_throughput": 1e3}


@pytest.mark.parametrize("value", ["9" * 400, "-" + "9" * 400, "1e999", "NaN", '"8"', "[]"])
@pytest.mark.parametrize("name", [*BENCH, "request_rate", "median_ttft_ms"])
def test_odd_number_in_a_result_is_missing(name: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(BENCH | {name: "HERE"}).replace('"HERE"', value))
    if name in ("max_concurrency", "request_rate", "median_ttft_ms"):
        ((offer, client),) = results.read([file])
        steps = [step_from_client(offer, client, LIMITS.contract)]
        assert conclude(steps, LIMITS, Circumstances("x")).steps
    else:
        with pytest.raises(BadUsage, match=f"lacks {name}"):
            results.read([file])


def test_results_of_too_many_steps_are_refused(tmp_path: Path) -> None:
    report = json.loads((DATA / "guidellm-0.8.1.json").read_text())
    report["benchmarks"] = report["benchmarks"][:1] * (results.MOST_STEPS + 1)
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(BadUsage, match="the results have 1,001 steps: a ramp is of at most 1,000"):
        results.read([tmp_path / "report.json"])
