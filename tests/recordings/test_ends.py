"""Onsets and ends of incidents: by the raw signal, not by the window that proves them."""

import gzip
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support import rewriting
from support.paths import RECORDINGS
from support.rewriting import Scrape
from support.sampling import sampled
from support.scenarios import found, present
from support.simulated_vllm import Engine, Limits, Request, page

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report
from diag.report import terminal

BEGUN = 1_795_000_000.0
Change = Callable[[Engine, float], None]


def judged(
    folder: Path,
    limits: Limits,
    every: float,
    end: float,
    rate: Callable[[float], float],
    prompt: int = 400,
    answer: int = 200,
    cached: Callable[[float], float] = lambda _: 0.0,
    change: Change = lambda _engine, _time: None,
) -> Report:
    """Judge a simulated server; requests arrive at a rate that depends on the time, from ten minutes before on."""
    draw, engine, at = random.Random(7), Engine(limits, BEGUN - 600), -600.0
    while (at := at + draw.expovariate(rate(at))) < end:
        size = max(20, round(draw.gauss(prompt, prompt / 8)))
        engine.send(Request(BEGUN + at, size, max(8, round(draw.gauss(answer, 40))), cached=round(size * cached(at))))

    def scrapes() -> Iterator[Scrape]:
        for time in np.arange(every, end, every).tolist():
            change(engine, time)
            engine.run(BEGUN + time)
            yield BEGUN + time, "vllm-0:8000", page([engine])

    return doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", scrapes()))]))


LOST = "prefix_cache_ineffective"
PREFILLS = Limits(token=0.0002)
"""Prompts that are not in the cache take 0.3 s, which short answers notice."""
CROWDED = Limits(max_num_seqs=8)


@sampled("every", [1, 5, 15])
def test_an_incident_that_the_last_minutes_refute_is_over(tmp_path: Path, every: float) -> None:
    """A burst of two minutes: the queue leads, three minutes after its end, and nobody has to shed load any more."""
    waits: list[float] = []

    def note(engine: Engine, time: float) -> None:
        if engine.waiting:
            waits.append(time)

    report = judged(tmp_path, CROWDED, every, 700, lambda t: 4.0 if 200 <= t < 320 else 0.8, change=note)
    queue, slo = (found(report, name).diagnosis for name in ("queue_saturation", "contract_breached"))
    assert (queue.ongoing, slo.ongoing, slo.explained_by) == (False, False, "queue_saturation")
    assert (report.verdict, queue.primary, queue.severity, slo.severity) == ("warning", True, "warning", "info")
    assert abs((queue.end or 0) - BEGUN - waits[-1]) <= every + 15
    assert (slo.end or 0) - BEGUN <= waits[-1] + every


@sampled("every", [5, 15])
def test_a_backlog_that_is_worked_off_needs_as_many_replicas_as_what_made_it_grow(tmp_path: Path, every: float) -> None:
    """Hundreds wait at the end of a burst of a quarter more than the server answers."""
    limits = Limits(num_gpu_blocks=1400, max_num_seqs=256)
    report = judged(tmp_path, limits, every, 1000, lambda t: 7.5 if 300 <= t < 440 else 0.5, 900, 150)
    texts = [proposal.text for proposal in found(report, "kv_pool_saturated").proposals]
    assert "Run 2 replicas, so that fewer requests share each KV cache." in texts


def test_an_episode_too_short_to_count_is_told(tmp_path: Path) -> None:
    report = judged(tmp_path, CROWDED, 15, 800, lambda t: 3.0 if 200 <= t < 288 else 0.6)
    brief = found(report, "queue_saturation").diagnosis._replace(state="absent", since=None, until=None)
    absent = [
        one._replace(diagnosis=brief)
        if one.diagnosis.subject == brief.subject and one.diagnosis.incident is brief.incident
        else one
        for one in report.findings
    ]
    text = terminal.render(report._replace(findings=tuple(absent)))
    assert re.search(r"brief +Requests queue while the KV cache has room .*queue_saturation.*, ended", text)


@sampled("every", [5, 15])
def test_an_incident_that_goes_on_is_not_over(tmp_path: Path, every: float) -> None:
    report = judged(tmp_path, CROWDED, every, 700, lambda t: 4.0 if t >= 200 else 0.8)
    assert found(report, "contract_breached").diagnosis.ongoing
    assert report.verdict == "critical"


@sampled("every", [5, 15, 30])
def test_a_hit_rate_that_fell_inside_of_a_recording_was_not_low_before(tmp_path: Path, every: float) -> None:
    """Over the 25 minutes, it is below the threshold; in the first windows, it is 93 %."""
    report = judged(tmp_path, PREFILLS, every, 1500, lambda _: 1.2, 1600, 60, cached=lambda t: 0.93 if t < 300 else 0.0)
    since = found(report, "prefix_cache_ineffective").diagnosis.since
    assert since is not None
    assert abs(since - BEGUN - 300) <= every + 15


def test_a_cap_at_which_the_kv_cache_is_as_good_as_full_is_not_raised_by_two_places(tmp_path: Path) -> None:
    both = Limits(max_num_seqs=32, num_gpu_blocks=2300)
    queue = found(judged(tmp_path, both, 5, 300, lambda _: 7, 600, 400), "queue_saturation")
    assert [proposal.fix.flag for proposal in queue.proposals] == [""], "more places are no answer: replicas are"


@sampled("every", [5, 15])
@pytest.mark.parametrize("left", [0.0, 0.33])
def test_a_prefix_cache_that_is_lost_explains_the_queue_of_its_prefills(
    tmp_path: Path, left: float, every: float
) -> None:
    limits = Limits(max_num_batched_tokens=2048, token=0.00045 / (1 - left))
    report = judged(tmp_path, limits, every, 1200, lambda _: 1.5, 1600, cached=lambda t: 0.93 if t < 500 else left)
    (lost,) = (each for each in report.present if each.diagnosis.primary)
    assert lost.diagnosis.incident.id == LOST
    assert lost.proposals[0].text.startswith("Undo the last change")
    assert abs((lost.diagnosis.since or 0) - BEGUN - 500) <= every + 10
    assert "queue_saturation" in {each.diagnosis.incident.id for each in report.present}


@sampled("every", [5, 15])
def test_many_more_requests_that_share_nothing_are_the_load_and_no_lost_cache(tmp_path: Path, every: float) -> None:
    limits = Limits(max_num_batched_tokens=2048, token=0.00045)
    cached, rate = lambda t: 0.93 if t < 500 else 0.0, lambda t: 0.7 if t < 500 else 1.5
    report = judged(tmp_path, limits, every, 1200, rate, 1600, cached=cached)
    assert LOST not in {each.diagnosis.incident.id for each in report.present if each.diagnosis.primary}


@sampled("every", [5, 15])
def test_a_cascade_is_dated_by_its_preemptions(tmp_path: Path, every: float) -> None:
    preempting: list[float] = []

    def note(engine: Engine, time: float) -> None:
        if engine.count["vllm:num_preemptions_total"] > sum(preempting[-1:]):
            preempting.append(time)

    limits = Limits(num_gpu_blocks=900, max_num_batched_tokens=2048, token=0.00005)
    report = judged(tmp_path, limits, every, 900, lambda t: 0.9 if t < 400 else 2.2, 500, 400, change=note)
    since = found(report, "kv_eviction_cascade").diagnosis.since
    assert since is not None
    assert abs(since - BEGUN - preempting[0]) <= every + 15


@sampled("every", [5, 15])
def test_a_cascade_ends_with_its_last_preemption(tmp_path: Path, every: float) -> None:
    """A window of three scrapes shows it for three scrapes more."""
    counted: list[tuple[float, float]] = []

    def note(engine: Engine, time: float) -> None:
        counted.append((time, engine.count["vllm:num_preemptions_total"]))

    limits = Limits(num_gpu_blocks=900, max_num_batched_tokens=2048, token=0.00005)
    report = judged(tmp_path, limits, every, 1500, lambda t: 2.2 if 400 <= t < 620 else 0.7, 500, 400, change=note)
    last = max(time for (_, before), (time, after) in pairwise(counted) if after > before)
    cascade = found(report, "kv_eviction_cascade").diagnosis
    assert not cascade.ongoing
    assert abs((cascade.end or 0) - BEGUN - last) <= 1.5 * every


def test_what_has_just_ended_leaves_no_suspect(tmp_path: Path) -> None:
    """The last five minutes still hold the pauses of long prompts that came until then: no compilation is suspected."""

    def change(engine: Engine, time: float) -> None:
        if 300 <= time < 620:
            engine.send(Request(BEGUN + time, 12_000, 8, cached=0))

    limits = Limits(token=0.0008, max_num_batched_tokens=8192)
    report = judged(tmp_path, limits, 15, 840, lambda _: 0.5, 100, 300, change=change)
    assert not found(report, "prefill_decode_contention").diagnosis.ongoing
    assert (report.verdict, report.health.suspects) == ("healthy", ())


@pytest.mark.parametrize(("pauses", "is_there"), [(True, True), (False, False)])
def test_preemptions_between_scrapes_show_in_pauses_of_streams(tmp_path: Path, pauses: bool, is_there: bool) -> None:
    """The queue is empty at each scrape; where no stream pauses either, nobody feels the preemptions."""
    waiting = re.compile(r"^(vllm:num_requests_waiting(?:_by_reason)?\{[^}]*\}) \S+", re.M)
    bucket = re.compile(r'^(vllm:inter_token_latency_seconds_bucket\{.*?le="[1-9][^"]*".*\}) \S+', re.M)

    def change(page: str) -> str:
        total = re.search(r"^vllm:inter_token_latency_seconds_count\S* (\S+)", page, re.M)
        page = waiting.sub(r"\1 0", page)
        return page if pauses or not total else bucket.sub(rf"\g<1> {total[1]}", page)

    pages = rewriting.changed(rewriting.scrapes("kv_cascade"), change)
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    assert ("kv_eviction_cascade" in present(report)) is is_there
    assert all(each.diagnosis.incident.id != "compiling_while_serving" for each in report.health.suspects)


@pytest.mark.parametrize("begin", [2.2, 8, 13, 15, 29, 38, 44])
def test_a_cascade_under_way_at_the_first_scrape_has_no_onset(tmp_path: Path, begin: float) -> None:
    """Preemptions come in bursts: at many scrapes there is none, and the queue goes on."""
    scrapes = list(rewriting.scrapes("kv_cascade"))
    cut = [scrape for scrape in scrapes if scrape[0] - scrapes[0][0] >= begin]
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path, cut))]))
    assert found(report, "kv_eviction_cascade").diagnosis.since is None


@pytest.mark.parametrize("begin", [0, 430])
def test_a_cascade_is_dated_only_by_a_recording_of_its_first_preemption(tmp_path: Path, begin: float) -> None:
    limits = Limits(num_gpu_blocks=900, max_num_batched_tokens=2048, token=0.00005)
    judged(tmp_path, limits, 5, 900, lambda t: 0.9 if t < 400 else 2.2, 500, 400)
    cut = [one for one in rewriting.scrapes(str(tmp_path / "recording")) if one[0] >= BEGUN + begin]
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "cut", cut))]))
    assert (found(report, "kv_eviction_cascade").diagnosis.since is None) == (begin > 0)


def test_a_hit_rate_that_was_always_low_is_told_as_before(tmp_path: Path) -> None:
    low = found(judged(tmp_path, PREFILLS, 15, 900, lambda _: 1.2, 1600, 60), "prefix_cache_ineffective").diagnosis
    assert (low.since, low.watched > 800) == (None, True)


def test_a_low_hit_rate_that_costs_nobody_time_is_not_told(tmp_path: Path) -> None:
    report = judged(tmp_path, Limits(), 15, 900, lambda _: 1.5, 1600)
    assert (report.verdict, LOST in {each.diagnosis.incident.id for each in report.present}) == ("healthy", False)


def test_a_mean_that_the_last_minutes_do_not_show_has_no_onset(tmp_path: Path) -> None:
    report = judged(tmp_path, PREFILLS, 15, 1500, lambda _: 1.2, 1600, 60, cached=lambda t: 0.93 if t > 1150 else 0.0)
    low = found(report, "prefix_cache_ineffective").diagnosis
    assert (low.since, low.watched) == (None, 0.0)


@sampled("every", [5, 15])
def test_drafts_that_were_accepted_before_date_the_info(tmp_path: Path, every: float) -> None:
    def worse(engine: Engine, time: float) -> None:
        if time > 500:
            engine.limits = replace(engine.limits, accepted=0.0)

    limits = Limits(drafted=4, accepted=0.5)
    since = found(
        judged(tmp_path, limits, every, 1800, lambda _: 1.5, change=worse), "speculation_ineffective"
    ).diagnosis.since
    assert since is not None
    assert abs(since - BEGUN - 500) <= every + 15


@pytest.mark.parametrize("name", ["contention_bigbatch"])
def test_a_hit_rate_that_wanders_about_its_limit_has_no_onset(name: str) -> None:
    """Its last crossing was told as the onset: 5 s and 29 s before the end of what was judged over all of it."""
    report = doctor.run(ObserveOptions([str(RECORDINGS / name)]))
    assert found(report, "prefix_cache_ineffective").diagnosis.since is None


def test_a_former_backlog_is_no_load(tmp_path: Path) -> None:
    """The pool holds two requests, and thirty wait: they came before, when more arrived than were answered."""
    limits = Limits(num_gpu_blocks=1250, max_model_len=16_384, token=0.0002, step=0.03)
    report = judged(tmp_path, limits, 15, 1000, lambda t: 0.2 if 0 <= t < 700 else 0.11 if t > 0 else 0.05, 9000, 300)
    proposals = next(each for each in report.present if each.diagnosis.primary).proposals
    text = next(each.text for each in proposals if "replicas" in each.text)
    assert text.split()[1] in ("2", "3")


def answering(time: float, start: float = BEGUN - 600) -> str:
    """Return the page of a process that has generated tokens since its start."""
    age = BEGUN + time - start
    counters = {"generation_tokens_total": 500, "prompt_tokens_total": 900, "iteration_tokens_total_count": 40}
    gauges = "".join(
        f'vllm:{name}{{engine="0"}} {value}\n'
        for name, value in (("num_requests_running", 8), ("num_requests_waiting", 0))
    )
    return (
        f"process_start_time_seconds {BEGUN - 600}\n"
        + gauges
        + "".join(f'vllm:{name}{{engine="0"}} {int(age * rate)}\n' for name, rate in counters.items())
    )


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [
        ("TimeoutError()", "unknown"),
        ("accepted the connection but sent nothing for 5 s", "unknown"),
        ("context deadline exceeded: timed out", "unknown"),
        ("ConnectionRefusedError(111, 'Connection refused')", "critical"),
        ("reset the connection", "critical"),
        ("HTTPError: HTTP Error 404: Not Found", "unknown"),
        ("answered HTTP 404", "unknown"),
        ("HTTPError: HTTP Error 502: Bad Gateway", "critical"),
        ("answered with HTTP 504", "unknown"),
        ("SSLCertVerificationError: certificate verify failed: certificate has expired", "unknown"),
    ],
)
def test_a_page_that_does_not_come_in_time_or_is_answered_otherwise_is_no_death(
    tmp_path: Path, reason: str, verdict: str
) -> None:
    """A hang, a lost host or the network; a lost route. A dead server refuses connections, its proxy says 502."""
    folder = rewriting.write(
        tmp_path / "recording", ((BEGUN + t, "h:1", answering(t) if t < 60 else "") for t in range(0, 600, 15))
    )
    text = gzip.decompress((folder / "metrics.prom.gz").read_bytes()).replace(b" refused\n", f" {reason}\n".encode())
    (folder / "metrics.prom.gz").write_bytes(gzip.compress(text))
    report = doctor.run(ObserveOptions([str(folder)]))
    assert report.verdict == verdict
    said = "in time" if re.search("time|nothing|504", reason.lower()) else "/health"
    assert any(said in why.why for why in report.not_judged) == (verdict == "unknown")


def test_another_answer_for_the_page_leaves_what_else_shows_a_death(tmp_path: Path) -> None:
    folder = rewriting.write(
        tmp_path / "recording", ((BEGUN + t, "h:1", answering(t) if t < 60 else "") for t in range(0, 600, 15))
    )
    text = gzip.decompress((folder / "metrics.prom.gz").read_bytes())
    text = text.replace(
        b" refused\n",
        b' answered HTTP 404\ndiag_vllm_processes{role="api_server"} 1\ndiag_vllm_processes{role="engine"} 0\n',
    )
    (folder / "metrics.prom.gz").write_bytes(gzip.compress(text))
    assert doctor.run(ObserveOptions([str(folder)])).verdict == "critical"


@pytest.mark.parametrize(("turns", "lead"), [(True, set()), (False, {"queue_saturation"})])
def test_the_queue_of_two_servers_in_turn_is_of_nobody(tmp_path: Path, turns: bool, lead: set[str]) -> None:
    """An idle pod answers every second scrape at the address of one that queues."""
    shown = (
        (at, host, rewriting.with_value(page, "process_start_time_seconds", f"{BEGUN - 9 * (turns and k % 2)}"))
        for k, (at, host, page) in enumerate(rewriting.scrapes("queue_saturation"))
    )
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", shown))]))
    assert present(report) == lead
    assert report.verdict == ("unknown" if turns else "warning")


def test_ranks_without_their_label_are_several_servers(tmp_path: Path) -> None:
    """A federation drops the label engine: each page has the counters of another rank, and no page fails."""
    pages = (
        (BEGUN + t, "h:1", re.sub("process_start.*\n", "", answering(t, BEGUN - 9000 - 3000 * (t // 15 % 3))))
        for t in range(0, 900, 15)
    )
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    assert report.verdict == "unknown"
    assert any("two servers answer" in why.why for why in report.not_judged)
    (note,) = (note for note in report.observed.notes if "counters" in note)
    assert "more than one server answers" in note


def test_counters_that_go_back_in_one_process_are_two_servers(tmp_path: Path) -> None:
    """Two pods with one start time behind one address: no rate is of one of them."""
    pages = ((BEGUN + t, "h:1", answering(t, BEGUN - 600 - 3000 * (t // 15 % 2))) for t in range(0, 900, 15))
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    assert report.verdict == "unknown"
    assert any("two servers answer" in why.why for why in report.not_judged)


@pytest.mark.parametrize("resets", [0, 1, 2])
def test_a_decrease_or_two_are_no_second_server(tmp_path: Path, resets: int) -> None:
    ages = (BEGUN - 600 + 300 * min(resets, t // 300) for t in range(0, 900, 15))
    pages = ((BEGUN + 15 * at, "h:1", answering(15 * at, start)) for at, start in enumerate(ages))
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    assert not any("two servers answer" in why.why for why in report.not_judged)
