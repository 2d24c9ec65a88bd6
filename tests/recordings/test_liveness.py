"""The /livez and /readyz responses through a recording: only a hang and a death are answered 503."""

from collections.abc import Iterable

import pytest
from support.paths import RECORDINGS
from support.rewriting import Scrape, answered, changed, scrapes
from support.sampling import some

from diag.diagnosis.progress import Health, Liveness

NO_PAGE = "diag_vllm_up 0\n"
"""What the exporter still answers where vLLM does not."""
DEAD = {
    "engine_dead_answers_fail",
    "engine_dead_page_lives",
    "engine_dead",
    "engine_device_fault",
    "engine_died_in_cascade_vllm_0_11_0",
    "gpu_fault",
    "host_memory_killed",
}
LOG_TELLS = {"elastic_scaling", "shutdown_drained", "shutdown_drops_requests"}
"""Servers that do not answer for a minute on purpose, as their log alone shows."""
ALL = sorted(folder.name for folder in RECORDINGS.iterdir() if (folder / "metrics.prom.gz").exists())


def healths(seen: Iterable[Scrape], every: float = 5.0) -> list[tuple[float, Health]]:
    """The health after each scrape of one server, and its unix seconds."""
    liveness = Liveness("server", every)
    return [(at, liveness.observe(round(1000 * at), (page or NO_PAGE).encode())) for at, _, page in answered(seen)]


def thinned_to(name: str, every: float, beside: bool = False) -> list[Scrape]:
    kept: list[Scrape] = []
    for scrape in scrapes(name, beside):
        if not kept or scrape[0] - kept[-1][0] > every - 0.25:
            kept.append(scrape)
    return kept


def going_on(seen: list[Scrape], seconds: float) -> list[Scrape]:
    """The last page again and again, as a server answers it that hangs."""
    last, instance, page = seen[-1]
    return [*seen, *((last + step, instance, page) for step in range(5, round(seconds) + 1, 5))]


@pytest.mark.parametrize("name", some([name for name in ALL if name not in DEAD | LOG_TELLS], 6))
def test_only_recorded_deaths_fail_livez(name: str) -> None:
    """Busy, idle, paused, starting, failing to start, long prefills and short hangs."""
    assert [health.liveness for _, health in healths(thinned_to(name, 5.0)) if not health.alive] == []


@pytest.mark.parametrize("name", ["shutdown_drained", "shutdown_drops_requests"])
def test_a_requested_shutdown_does_not_fail_livez(name: str) -> None:
    assert [health.liveness for _, health in healths(thinned_to(name, 5.0, beside=True)) if not health.alive] == []


@pytest.mark.parametrize("name", sorted(DEAD))
def test_a_death_is_answered_503_within_90_seconds(name: str) -> None:
    seen = thinned_to(name, 5.0)
    last = healths(going_on(seen, 60))[-1][1]
    assert (last.alive, last.ready) == (False, False)
    assert " is dead: " in last.liveness


def hung_at(name: str, after: float) -> list[Scrape]:
    """A recording whose pages stay what they were so many seconds after its beginning."""
    seen = thinned_to(name, 5.0)
    kept = [scrape for scrape in seen if scrape[0] - seen[0][0] <= after]
    return going_on(kept, 150)


def test_standstill_fails_livez_only_after_two_minutes() -> None:
    seen = hung_at("healthy", 60)
    begun = seen[-1][0] - 150
    told = healths(seen)
    first = next(at for at, health in told if not health.alive)
    assert 115 <= first - begun <= 130
    waiting = next(health for at, health in told if at >= begun + 60)
    assert waiting.ready is False
    assert "requests in flight, and no token or request moves (the answer is 503 if that lasts" in waiting.liveness


@pytest.mark.parametrize("name", ["healthy", "idle"])
def test_stopped_process_fails_livez_within_35_seconds(name: str) -> None:
    """Just after a scrape or just before the next one, which shows both; SIGCONT makes the answer 200 again."""
    soonest, latest = 0.1, 4.9
    seen = hung_at(name, 40)
    begun = seen[-1][0] - 150
    process = 'pid="7",role="engine",rank="0",host="h",state="stopped"'
    moves = list(scrapes(name))[-6:]
    goes_on = [(seen[-1][0] + 5 * step, who, page) for step, (_, who, page) in enumerate(moves, 1)]

    def with_process(scrape: Scrape) -> Scrape:
        at, instance, page = scrape
        stopped = begun + soonest <= at <= seen[-1][0]
        return at, instance, f"{page}diag_vllm_up 1\ndiag_vllm_process_state{{{process}}} {stopped:d}\n"

    told = healths(map(with_process, [*seen, *goes_on]))
    failed = [at for at, health in told if not health.alive]
    assert 25 <= failed[0] - (begun + latest) < failed[0] - (begun + soonest) <= 35
    assert told[-1][1].alive


def test_process_stopped_for_a_moment_is_not_restarted() -> None:
    """A debugger that takes a stack trace stops the process; the first scrapes of an exporter may fall into it."""
    seen = hung_at("healthy", 0)
    process = 'diag_vllm_process_state{pid="7",role="engine",rank="0",host="h",state="stopped"} 1\n'
    told = healths((at, who, f"{page}diag_vllm_up 1\n{process}") for at, who, page in seen)
    assert next(round(at - seen[0][0]) for at, health in told if not health.alive) >= 25


def test_a_server_that_is_paused_or_gone_gets_no_requests_and_is_not_restarted() -> None:
    paused = healths(thinned_to("scheduler_paused", 2.0))[-1][1]
    assert (paused.alive, paused.ready) == (True, False)
    assert "POST /resume" in paused.readiness
    silent = healths(scrapes("fail_max_model_len"))[-1][1]
    assert (silent.alive, silent.ready, silent.readiness) == (True, False, "vLLM's /metrics does not answer")


def test_an_engine_that_waits_for_recovery_is_not_restarted_and_gets_no_requests() -> None:
    """Its requests were aborted, and new ones wait: without the line of its log it would be a stall after 2 minutes."""
    seen = hung_at("healthy", 60)
    begun = seen[-1][0] - 150
    event = "diag_vllm_log_event_last_timestamp_seconds"
    logged = f'{event}{{event="engine_fault_held"}} {begun}\n{event}{{event="engine_fault_over"}} 0\n'
    start = f"diag_vllm_startup_last_progress_timestamp_seconds {begun - 60}\n"
    told = healths((at, who, f"{page}diag_vllm_up 1\n{start}{logged if at >= begun else ''}") for at, who, page in seen)
    assert all(health.alive for _, health in told)
    assert not told[-1][1].ready and "/fault_tolerance/apply" in told[-1][1].readiness


def test_state_of_a_server_without_counters_cannot_be_told() -> None:
    """Requests in flight alone do not show whether any token moves."""

    def gauges(page: str) -> str:
        return "".join(f"{line}\n" for line in page.split("\n") if line.startswith("vllm:num_requests_"))

    health = healths(changed(scrapes("healthy"), gauges))[-1][1]
    assert (health.alive, health.ready) == (True, True)
    assert health.liveness.startswith("cannot tell: ")


def test_a_server_that_serves_again_is_ready_at_once() -> None:
    """Its container was started again; what was seen before is not held against it."""
    dead = going_on(thinned_to("engine_dead", 5.0), 60)
    again = [(dead[-1][0] + 10 * step, who, page) for step, (_, who, page) in enumerate(list(scrapes("idle"))[:6], 1)]
    told = [health for _, health in healths([*dead, *again])]
    assert not told[len(dead) - 1].alive
    assert all(health.alive and health.ready for health in told[len(dead) + 1 :])
