"""Speculation, LoRA slots, the API server and an idle budget: each is found where it is, and in nothing like it."""

import re as regex
from collections.abc import Callable
from pathlib import Path

import pytest
from support import rewriting as re
from support import scenarios
from support.connector_pages import value
from support.scenarios import GIB, gpu

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Finding, Report
from diag.report.coverage import lacking

Change = Callable[[str], str]


def judged(folder: Path, recording: str, *changes: Change) -> Report:
    """A recording with every page changed."""
    pages = re.scrapes(recording)
    for change in changes:
        pages = re.changed(pages, change)
    return doctor.run(ObserveOptions([str(re.write(folder / "recording", pages))]))


def about(report: Report, incident: str) -> Finding:
    (found,) = (each for each in report.findings if each.diagnosis.incident.id == incident)
    return found


def state(report: Report, incident: str) -> str:
    diagnosis: Diagnosis = about(report, incident).diagnosis
    return diagnosis.state


def proposed(report: Report, incident: str) -> dict[str, object]:
    """Return the proposals, by flag or the first words of advice."""
    proposals = about(report, incident).proposals
    return {each.name or " ".join(each.text.split()[:3]): each.after for each in proposals}


def scaled(series: str, factor: float) -> Change:
    """Every sample of the series whose line begins so, times a factor."""
    line = regex.compile(rf"^({regex.escape(series)}\S*) (\S+)$", regex.MULTILINE)
    return lambda page: line.sub(lambda found: f"{found[1]} {float(found[2]) * factor}", page)


def without(series: str) -> Change:
    """The page of a release, or a server, that does not have the series."""
    line = regex.compile(rf"^{regex.escape(series)}.*\n", regex.MULTILINE)
    return lambda page: line.sub("", page)


def shorter_queue(factor: float) -> Change:
    """Queue time in the histogram and, by Little's law, in the gauges."""
    time, requests = scaled("vllm:request_queue_time_seconds_sum", factor), scaled("vllm:num_requests_waiting", factor)
    return lambda page: requests(time(page))


def longer_answers(factor: float) -> Change:
    time, requests = scaled("vllm:e2e_request_latency_seconds_sum", factor), scaled("vllm:num_requests_running", factor)
    return lambda page: requests(time(page))


def labelled(old: str, new: str) -> Change:
    return lambda page: page.replace(old, new)


def deferred_only(share: float) -> Change:
    """The page of a server at which this share of the waiting requests is deferred; the others wait for capacity."""
    gauge = 'vllm:num_requests_waiting{}{{engine="0",model_name="tiny"{}'

    def change(page: str) -> str:
        waiting = value(page, gauge.format("", "}"))
        for reason, part in {"capacity": 1 - share, "deferred": share}.items():
            page = re.with_value(page, gauge.format("_by_reason", f',reason="{reason}"'), f"{part * waiting}")
        return page

    return change


# -- speculative decoding ---------------------------------------------------------------------------------------------

SPECULATION = "speculation_ineffective"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
RATE = "draft acceptance rate"


def test_drafts_with_a_rejected_first_token_are_switched_off(tmp_path: Path) -> None:
    report = judged(tmp_path, SPECULATION)
    assert (report.verdict, state(report, SPECULATION)) == ("healthy", "present")
    assert "--speculative-config" in proposed(report, SPECULATION)
    assert "Draft at most" not in proposed(report, SPECULATION)


@pytest.mark.parametrize(("factor", "tokens"), [(5, 1), (30, 2)])
def test_drafts_with_an_accepted_beginning_are_shortened(tmp_path: Path, factor: float, tokens: int) -> None:
    better = [scaled(f"{ACCEPTED}_per_pos_total", factor), scaled(f"{ACCEPTED}_total", 5)]
    report = judged(tmp_path, SPECULATION, *better)
    assert state(report, SPECULATION) == "present"
    assert proposed(report, SPECULATION)["Draft at most"] == tokens
    assert "--speculative-config" not in proposed(report, SPECULATION)


def test_accepted_drafts_are_no_incident(tmp_path: Path) -> None:
    assert state(judged(tmp_path, "speculation_effective"), SPECULATION) == "absent"


def test_short_accepted_drafts_are_no_incident(tmp_path: Path) -> None:
    assert state(judged(tmp_path, SPECULATION, scaled(DRAFT_TOKENS, 0.05)), SPECULATION) == "absent"


def test_server_without_drafts_has_no_speculation_incident(tmp_path: Path) -> None:
    assert state(judged(tmp_path, "healthy"), SPECULATION) == "absent"


def test_few_drafts_are_unknown(tmp_path: Path) -> None:
    few = [scaled(each, 0.001) for each in (DRAFTS, DRAFT_TOKENS, ACCEPTED)]
    found = about(judged(tmp_path, SPECULATION, *few), SPECULATION).diagnosis
    assert (found.state, lacking(found)) == ("unknown", [f"{RATE} not measured, it needs at least 200 draft tokens"])


def test_long_draft_with_low_acceptance_can_still_pay(tmp_path: Path) -> None:
    assert state(judged(tmp_path, SPECULATION, scaled(DRAFTS, 0.05)), SPECULATION) == "absent"


def test_a_release_that_counts_no_drafts_cannot_tell(tmp_path: Path) -> None:
    """The V0 engine counted tokens only."""
    report = judged(tmp_path, SPECULATION, without(DRAFTS), without(f"{ACCEPTED}_per_pos"))
    assert state(report, SPECULATION) == "unknown"


# -- LoRA adapters ----------------------------------------------------------------------------------------------------

THRASH = "lora_thrash"
INFO = "vllm:lora_requests_info"


def aged(seconds: float) -> Change:
    """The page of a server whose adapters ran that much longer ago."""
    line = regex.compile(rf"^({INFO}\S*) (\S+)$", regex.MULTILINE)
    return lambda page: line.sub(lambda found: f"{found[1]} {float(found[2]) - seconds}", page)


def test_alternating_adapters_get_one_slot_each(tmp_path: Path) -> None:
    report = judged(tmp_path, THRASH)
    assert (report.verdict, scenarios.present(report)) == ("warning", {THRASH})
    assert proposed(report, THRASH)["--max-loras"] == 6


def proposals_of(folder: Path, recording: str, launch: str) -> dict[str, dict[str, object]]:
    """Return the proposals of the first finding for these pages and this launch command: changes by flag."""
    pages = re.write(folder / "recording", re.changed(re.scrapes(recording), without("diag_vllm_config")))
    found = doctor.run(ObserveOptions([str(pages)], launch=launch)).present[0]
    return {each.name: {one.name: one.after for one in each.changes} for each in found.proposals if each.changes}


@pytest.mark.parametrize(("kept", "changes"), [(4, {"--max-loras": 6, "--max-cpu-loras": 6}), (8, {"--max-loras": 6})])
def test_no_more_adapters_run_than_are_kept(tmp_path: Path, kept: int, changes: dict[str, object]) -> None:
    """VLLM refuses fewer in the memory of the host than in a batch."""
    launch = f"vllm serve m --enable-lora --max-loras 2 --max-cpu-loras {kept}"
    assert proposals_of(tmp_path, THRASH, launch) == {"--max-loras": changes}


def test_as_many_adapters_as_slots_are_no_thrash_after_others(tmp_path: Path) -> None:
    """Two of six adapters of the last minutes are left, in two slots: no request is deferred."""
    report = judged(tmp_path, "lora_fits")
    assert (report.verdict, state(report, THRASH)) == ("healthy", "absent")


@pytest.mark.parametrize(
    "change",
    [
        labelled('max_lora="2"', 'max_lora="6"'),
        labelled('max_lora="2"', 'max_lora="17"'),
        aged(400),
        shorter_queue(0.01),
        longer_answers(10),
        deferred_only(0.1),
    ],
    ids=["a slot for each", "more slots", "long ago", "short waits", "a small share", "for capacity"],
)
def test_deferred_requests_with_other_causes_are_no_thrash(tmp_path: Path, change: Change) -> None:
    assert state(judged(tmp_path, THRASH, change), THRASH) == "absent"


def test_deferred_requests_of_unlisted_adapters_cannot_be_told(tmp_path: Path) -> None:
    """If a KV connector is there, they wait for a transfer; without one, a family may be missing."""
    unlisted = without(INFO)
    assert state(judged(tmp_path / "alone", THRASH, unlisted), THRASH) == "unknown"
    line = 'vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 9\n'
    connected = without("vllm:external_prefix_cache_queries_total")
    changes = (unlisted, connected, lambda page: page + line)
    assert state(judged(tmp_path / "connected", THRASH, *changes), THRASH) == "absent"


def test_short_queue_times_are_no_thrash(tmp_path: Path) -> None:
    """A quarter of a second, which is most of the time that short answers take."""
    fast = [shorter_queue(0.1), longer_answers(0.1)]
    assert state(judged(tmp_path, THRASH, *fast), THRASH) == "absent"


def test_a_release_that_does_not_say_why_requests_wait_cannot_tell(tmp_path: Path) -> None:
    """Before 0.20; where nobody waits, there is nothing to tell."""
    before = without("vllm:num_requests_waiting_by_reason")
    assert state(judged(tmp_path, THRASH, before), THRASH) == "unknown"
    assert state(judged(tmp_path, "lora_fits", before), THRASH) == "absent"


def test_a_page_without_adapters_and_reasons_is_not_whole(tmp_path: Path) -> None:
    """This release exports the reasons: nothing tells a queue for slots from one for capacity."""
    report = judged(tmp_path, THRASH, without(INFO), without("vllm:num_requests_waiting_by_reason"))
    assert (state(report, THRASH), state(report, "queue_saturation")) == ("unknown", "unknown")


def test_requests_of_a_pooling_model_queue_although_none_is_seen_to_run(tmp_path: Path) -> None:
    one_step = (scaled(f"vllm:{name}", 0) for name in ("num_requests_running", "generation_tokens_total"))
    assert state(judged(tmp_path, "queue_saturation", *one_step), "queue_saturation") == "present"


def test_a_server_without_adapters_has_no_thrash(tmp_path: Path) -> None:
    assert state(judged(tmp_path, "queue_saturation"), THRASH) == "absent"


# -- the API server ---------------------------------------------------------------------------------------------------

FRONT = "api_server_bound"
OWN_CPU = "process_cpu_seconds_total"
TABLE = "diag_vllm_process_cpu_seconds_total"
LATENCY = "vllm:e2e_request_latency_seconds_sum"
QUEUE, ENGINE = "vllm:request_queue_time_seconds_sum", "vllm:request_inference_time_seconds_sum"


def own_cores(page: str) -> float:
    """The seconds that the API server says it has computed."""
    return float(regex.search(rf"^{OWN_CPU} (\S+)", page, regex.MULTILINE)[1])


def beside(*servers: float) -> Change:
    """The page of an exporter, with a process table of API servers that use so many times as much."""
    start = own_cores(next(iter(re.scrapes(FRONT)))[2])

    def change(page: str) -> str:
        spent = own_cores(page) - start
        return page + "".join(
            f'{TABLE}{{pid="{pid}",role="api_server",rank="{pid}"}} {30 + each * spent}\n'
            for pid, each in enumerate(servers)
        )

    return change


def queued(share: float) -> Change:
    """Return pages with this share of the latency spent in the queue."""

    def change(page: str) -> str:
        whole = regex.search(rf"^{LATENCY}\S* (\S+)", page, regex.MULTILINE)
        return re.with_value(page, QUEUE, str(share * float(whole[1]))) if whole else page

    return change


def test_api_server_at_a_full_core_gets_more_processes(tmp_path: Path) -> None:
    report = judged(tmp_path, FRONT)
    assert (report.verdict, scenarios.present(report)) == ("warning", {FRONT})
    assert proposed(report, FRONT)["--api-server-count"] == 6  # one core, four times the load, 0.7 of a core each


def test_requests_that_reach_the_engine_late_are_measured_by_their_responses(tmp_path: Path) -> None:
    """The engine's end-to-end latency may begin once the API server has handed a request over."""
    assert state(judged(tmp_path, FRONT, scaled(LATENCY, 0.1)), FRONT) == "present"


@pytest.mark.parametrize(("interval", "proposed"), [(12, True), (32, False)])
def test_tokens_are_never_sent_in_smaller_groups(tmp_path: Path, interval: int, proposed: bool) -> None:
    assert (
        "--stream-interval" in proposals_of(tmp_path, FRONT, f"vllm serve m --stream-interval {interval}")
    ) is proposed


def test_api_server_below_a_full_core_is_no_incident(tmp_path: Path) -> None:
    report = judged(tmp_path, "api_server_busy")
    assert (report.verdict, state(report, FRONT)) == ("healthy", "absent")


@pytest.mark.parametrize(
    "changes",
    [
        (without(TABLE), scaled(OWN_CPU, 0.8)),
        (scaled(ENGINE, 45),),
        (queued(0.3),),
    ],
    ids=["no core to run on", "the engine computes", "a queue for the engine"],
)
def test_slow_answers_with_other_causes_are_no_bound_api_server(tmp_path: Path, changes: tuple[Change, ...]) -> None:
    assert state(judged(tmp_path, FRONT, *changes), FRONT) == "absent"


def test_few_slow_requests_leave_the_api_server_unknown(tmp_path: Path) -> None:
    few = scaled("vllm:request_success_total", 0.03)
    assert state(judged(tmp_path, FRONT, few), FRONT) == "unknown"


def test_several_api_servers_are_counted_by_the_process_table_only(tmp_path: Path) -> None:
    report = judged(tmp_path, FRONT, without(TABLE), beside(1.0, 0.9, 0.0), without(OWN_CPU))
    assert state(report, FRONT) == "present"
    assert proposed(report, FRONT)["--api-server-count"] == 11


def test_cpu_usage_of_the_api_server_is_unknown_without_page_and_process_table(tmp_path: Path) -> None:
    assert state(judged(tmp_path, FRONT, without(TABLE), without(OWN_CPU)), FRONT) == "unknown"


def test_busy_api_server_beside_an_idle_one_gets_more_processes(tmp_path: Path) -> None:
    """One of four is full, and the load of all of them would need fewer: one more is proposed."""
    report = judged(tmp_path, FRONT, without(TABLE), beside(1.0, 0.1, 0.1, 0.1), scaled(ENGINE, 40))
    assert proposed(report, FRONT)["--api-server-count"] == 5


def test_process_table_overrides_the_page(tmp_path: Path) -> None:
    assert state(judged(tmp_path, FRONT, without(TABLE), beside(0.3)), FRONT) == "absent"


# -- an idle budget ---------------------------------------------------------------------------------------------------

BUDGET = "kv_budget_too_small"


def numberless(label: str) -> Change:
    """The page of a server on which nobody set this."""
    return lambda page: regex.sub(rf'{label}="\d+"', f'{label}="None"', page)


HALF = (
    labelled('gpu_memory_utilization="0.92"', 'gpu_memory_utilization="0.5"'),
    numberless("num_gpu_blocks_override"),
    numberless("kv_cache_memory_bytes"),
)
"""The page of a server that was given half of its GPU."""
FREE = {"memory_free_bytes": 38 * GIB}


def hosted(
    folder: Path, *beside: scenarios.Beside, recording: str = "healthy", changes: tuple[Change, ...] = HALF
) -> str:
    """Return the finding on the budget with these parts of the exporter's page beside vLLM's."""
    return state(on_host(folder, *beside, recording=recording, changes=changes), BUDGET)


def on_host(
    folder: Path, *beside: scenarios.Beside, recording: str = "healthy", changes: tuple[Change, ...] = HALF
) -> Report:
    scrapes = list(re.scrapes(recording))
    start = scrapes[0][0]
    for change in changes:
        scrapes = list(re.changed(scrapes, change))
    pages = ((t, host, page + scenarios.text(t - start, page, beside)) for t, host, page in scrapes)
    return doctor.run(ObserveOptions([str(re.write(folder / "recording", pages))]))


def test_unused_memory_is_reported_with_a_larger_share(tmp_path: Path) -> None:
    report = on_host(tmp_path, gpu(memory_free_bytes=28 * GIB))
    assert (report.verdict, state(report, BUDGET)) == ("healthy", "present")
    assert proposed(report, BUDGET)["--gpu-memory-utilization"] == 0.8  # 0.5, and 28 of 80 GiB less 0.05


def test_no_share_beyond_what_starts_is_proposed(tmp_path: Path) -> None:
    report = on_host(tmp_path, gpu(memory_free_bytes=48 * GIB))
    assert proposed(report, BUDGET)["--gpu-memory-utilization"] == 0.95


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_free_bytes": 10 * GIB},
        {**FREE, "process_memory_bytes:7,other,": 10 * GIB},
        {**FREE, "process_memory_bytes:7,unknown,": 10 * GIB},
    ],
    ids=["little is free", "a co-tenant", "somebody's, perhaps a co-tenant's"],
)
def test_memory_in_use_is_not_reported_as_unused(tmp_path: Path, changes: dict[str, object]) -> None:
    assert hosted(tmp_path, gpu(**changes)) == "absent"


@pytest.mark.parametrize(
    ("recording", "changes"),
    [
        ("kv_cascade", HALF),
        ("idle", HALF),
        ("healthy_after_cascade", HALF),
        ("healthy", HALF[1:]),
        ("healthy", (HALF[0], HALF[1])),
        ("healthy", (HALF[0], HALF[2])),
    ],
    ids=[
        "a full pool",
        "nobody",
        "a quiet hour",
        "the usual share",
        "so many bytes",
        "so many blocks",
    ],
)
def test_justified_memory_budget_is_not_too_small(tmp_path: Path, recording: str, changes: tuple[Change, ...]) -> None:
    assert hosted(tmp_path, gpu(**FREE), recording=recording, changes=changes) == "absent"


def test_memory_budget_is_unknown_with_few_requests(tmp_path: Path) -> None:
    few = (*HALF, scaled("vllm:request_success_total", 0.01))
    assert hosted(tmp_path, gpu(**FREE), recording="healthy", changes=few) == "unknown"


def test_memory_budget_is_unknown_without_gpu_metrics(tmp_path: Path) -> None:
    assert hosted(tmp_path) == "unknown"


def test_a_gpu_of_others_on_the_same_host_is_not_counted(tmp_path: Path) -> None:
    other = gpu(1, serving=0, memory_free_bytes=GIB, **{"process_memory_bytes:7,other,": 70 * GIB})
    assert hosted(tmp_path, gpu(0, **FREE), other) == "present"
