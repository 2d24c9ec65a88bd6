"""Check whether a change fixed an incident: pairs of recordings of real servers, described in their README."""

import functools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from support import rewriting, scenarios
from support.bad_servers import Reply, on_metrics, serving
from support.cli import diag
from support.paths import RECORDINGS, ROOT
from support.sampling import some
from support.scenarios import Beside, gpu
from support.schemas import validator
from support.timelines import hot

from diag.commands import verify as verifying
from diag.commands.observe import ObserveOptions, take_snapshot
from diag.core.errors import BadUsage
from diag.core.incident import Incident, Severity, judged
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Snapshot
from diag.knowledge.catalog import load
from diag.knowledge.signals import (
    preemptions_felt,
    prefills_in_pauses,
    requests_running,
    requests_that_fit_kv_cache,
)
from diag.report import verify as report
from diag.verify.changes import WORK, AppliedFix, Bounds, SignalDelta, bucket, expected, options, signal_deltas
from diag.verify.compare import Verification, compare
from diag.vllm.command.parse import parse

SCHEMA = validator(ROOT / "diag" / "report" / "diag.verify.schema.json")
PAIRS = [
    # a cap below what the pool holds ends the evictions and halves the output
    ("kv_cascade_base", "cure_max_num_seqs_p90", "fixed"),
    ("kv_cascade_base", "cure_max_num_seqs_mean", "fixed"),
    # a watermark halves them
    ("kv_cascade_base", "cure_watermark", "better"),
    ("cure_watermark", "kv_cascade_base", "worse"),
    # the same once more: once the same recording, once another run of the same load
    ("kv_cascade_base", "kv_cascade_base", "no effect"),
    ("kv_cascade", "kv_cascade_base", "no effect"),
    ("kv_cascade_base", "kv_cascade", "no effect"),
    ("engine_stalled", "engine_stalled", "no effect"),
    ("engine_dead", "engine_dead", "no effect"),
    ("startup_crash_blocksize16", "startup_crash_blocksize16", "no effect"),
    ("prefix_unique", "prefix_unique", "no effect"),
    # the queue is gone because evictions do its work: taking the cap away again
    ("cure_max_num_seqs_mean", "kv_cascade_base", "worse"),
    # freezes go, though the 99th percentile of gaps rises from 0.05 to 0.30 s
    ("contention_bigbatch", "contention_smallbatch", "fixed"),
    ("contention_smallbatch", "contention_bigbatch", "worse"),
    # a prompt every 12 s: in the last window before the change, hardly a pause is left
    ("contention_vllm_0_11_0", "contention_cure_threshold_vllm_0_11_0", "fixed"),
    # three prompts of 4,000 tokens every 11 s, and one of 7,000 every 15 s
    ("contention_bigbatch", "contention_cure_threshold", "not comparable"),
    # 28 clients or 24, and 4 or 6
    ("kv_cascade", "healthy_after_cascade", "not comparable"),
    ("queue_saturation", "healthy", "not comparable"),
    ("kv_cascade_base", "kv_saturated_fit", "not comparable"),
    ("kv_undersized", "kv_cascade_base", "not comparable"),
    # six clients as before, of a server that was dead
    ("engine_dead", "healthy", "fixed"),
    # stalls that had ended by themselves
    ("engine_stalled", "healthy", "not comparable"),
    ("tp2_long_stall", "tp2_healthy_between", "not comparable"),
    # a start that failed, and one that did not
    ("startup_crash_blocksize16", "healthy", "fixed"),
    ("startup_crash_blocksize16", "idle", "fixed"),
    ("startup_crash_blocksize16", "startup_hang", "not comparable"),
    ("fail_max_model_len", "healthy", "fixed"),
    # nobody there, or nothing
    ("kv_cascade_base", "idle", "not comparable"),
    ("kv_cascade_base", "engine_dead", "not comparable"),
    ("kv_cascade_base", "startup_hang", "not comparable"),
    # nothing was wrong before
    ("healthy", "healthy", "not comparable"),
    ("healthy", "queue_saturation", "not comparable"),
    ("healthy", "engine_stalled", "worse"),
    ("healthy", "engine_dead", "worse"),
    ("healthy", "startup_crash_blocksize16", "worse"),
    ("queue_saturation", "engine_dead", "worse"),
    ("startup_hang", "healthy", "not comparable"),
]
CHOSEN = some(PAIRS, 18)


@functools.cache
def snapshot(path: Path) -> Snapshot:
    return take_snapshot(ObserveOptions([str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)]))


def verified(before: str | Path, after: str | Path) -> Verification:
    sides = (RECORDINGS / each if isinstance(each, str) else each for each in (before, after))
    return compare(*map(snapshot, sides))


def line_1(found: Verification) -> str:
    return report.headlines(found)[0]


@pytest.mark.parametrize(("before", "after", "verdict"), CHOSEN)
def test_the_verdict_on_pairs_of_real_recordings(before: str, after: str, verdict: str) -> None:
    found = verified(before, after)
    assert (found.verdict, line_1(found)) == (verdict, line_1(found))
    assert line_1(found).startswith(verdict.upper())


@pytest.mark.parametrize(("before", "after", "_"), CHOSEN)
def test_terminal_json_and_markdown_of_every_pair(before: str, after: str, _: str) -> None:
    found = verified(before, after)
    SCHEMA.validate(json.loads(report.DOCUMENT.text(found)))
    lines = report.render(found).splitlines()
    assert max(map(len, lines)) <= 100
    assert report.render_markdown(found).startswith(f"**{found.verdict.upper()}")


# -- what it costs, and what was changed ------------------------------------------------------------------------------


def test_a_fix_that_halves_the_output_names_the_trade_off_in_line_1() -> None:
    head = line_1(verified("kv_cascade_base", "cure_max_num_seqs_p90"))
    assert head.startswith(
        "FIXED, WITH TRADE-OFFS kv_eviction_cascade on 127.0.0.1:8216 engine 0: output tokens / s 1,375 -> 709"
    )
    assert "TTFT p50 <= 5 s -> <= 20 s" in head
    assert "new: queue_saturation (warning)" in head


def test_the_noise_between_two_runs_of_one_load_is_no_trade_off() -> None:
    (server,) = verified("kv_cascade", "kv_cascade_base").servers
    assert not server.trade_offs


def test_incomparable_snapshots_have_no_trade_offs() -> None:
    (server,) = verified("healthy", "queue_saturation").servers
    assert any(each.change == "worse" for each in server.user_metrics)
    assert not server.trade_offs


def test_inter_token_latency_is_judged_by_its_maximum() -> None:
    (server,) = verified("contention_bigbatch", "contention_smallbatch").servers
    metrics = {metric.name: (metric.after, metric.change) for metric in server.user_metrics}
    assert metrics["ITL (maximum)"] == (Bounds(0.3, 0.4), "better")
    assert metrics["ITL p99.9"] == (Bounds(0.3, 0.4), "better")


@pytest.mark.parametrize(
    ("after", "flag", "values", "proposed"),
    [
        ("cure_max_num_seqs_p90", "--max-num-seqs", ("64", "3"), ""),
        ("cure_watermark", "--watermark", (None, "0.05"), "0.08"),
    ],
)
def test_changed_flag_is_recognized_as_the_fix(
    after: str, flag: str, values: tuple[str | None, str], proposed: str
) -> None:
    (server,) = verified("kv_cascade_base", after).servers
    assert [(each.name, each.before, each.after) for each in server.changes] == [(flag, *values)]
    assert server.first is not None
    assert [(each.fix.flag, each.proposed) for each in server.first.applied_fixes] == [(flag, proposed)]


def test_a_flag_that_moved_in_the_opposite_direction_is_no_fix() -> None:
    (server,) = verified("cure_max_num_seqs_mean", "cure_max_num_seqs_p90").servers
    assert [each.name for each in server.changes] == ["--max-num-seqs"]
    assert server.first is not None
    assert not server.first.applied_fixes
    assert "none: the change is no known fix of Requests queue" in report.render(
        verified("cure_max_num_seqs_mean", "cure_max_num_seqs_p90")
    )


def test_settings_that_vllm_derives_are_marked() -> None:
    (server,) = verified("queue_saturation", "healthy").servers
    derived = {each.name: (each.before, each.after) for each in server.changes if each.derived}
    assert derived["num_gpu_blocks"] == ("384", "2048")


def test_a_setting_that_one_side_does_not_publish_is_no_change(tmp_path: Path) -> None:
    bare = rewriting.write(tmp_path / "bare", rewriting.scrapes("kv_cascade_base"))
    (server,) = verified("kv_cascade_base", bare).servers
    assert {each.name for each in server.changes} > {"--max-num-seqs"}
    assert not any(each.known for each in server.changes)
    assert "no difference is known" in report.render(verified("kv_cascade_base", bare))
    (server,) = verified(bare, "cure_max_num_seqs_mean").servers
    assert server.first is not None
    assert not server.first.applied_fixes


def test_a_process_command_without_variables_leaves_them_unknown(tmp_path: Path) -> None:
    folder = rewriting.pages_alone(tmp_path, "kv_cascade_base")
    about = (folder / "recording.toml").read_text(encoding="utf-8")
    (folder / "recording.toml").write_text(re.sub(r'launch = ".*?python', 'launch = "python', about), encoding="utf-8")
    (server,) = verified("kv_cascade_base", folder).servers
    assert {each.name for each in server.changes} == {
        "HF_HUB_OFFLINE",
        "VLLM_NO_USAGE_STATS",
        "VLLM_CPU_KVCACHE_SPACE",
    }
    assert not any(each.known for each in server.changes)


def test_options_are_read_as_they_are_written() -> None:
    command = (
        "A_B=1 sh -c 'vllm serve m --kv-cache-dtype=fp8 --max_num_seqs 6 --enforce-eager --no-enable-prefix-caching'"
    )
    assert options(parse(command)) == {
        "A_B": "1",
        "--model": "m",
        "--kv-cache-dtype": "fp8",
        "--max-num-seqs": "6",
        "--enforce-eager": "",
        "--enable-prefix-caching": "False",
    }


BASE = list(rewriting.scrapes("kv_cascade_base"))


# -- whether two looks can be compared --------------------------------------------------------------------------------


def test_the_load_matches_the_counters_of_the_pages() -> None:
    counts = [sum(map(float, re.findall(r"(?m)^vllm:request_success_total.* (.*)$", page))) for _, _, page in BASE]
    (server,) = verified("kv_cascade_base", "kv_cascade_base").servers
    assert server.loads[0].finished == pytest.approx(counts[-1] - counts[0])
    assert server.loads[0].arrivals == pytest.approx(server.loads[0].finished / (BASE[-1][0] - BASE[0][0]), rel=0.05)


@pytest.mark.parametrize("counter", ["vllm:request_success_total", "vllm:request_prompt_tokens_sum"])
def test_offered_load_counts_unfinished_requests(tmp_path: Path, counter: str) -> None:
    """Half of the requests never finish, or only those with the shorter prompts: as many arrived, and as long ones."""

    def fewer(page: str) -> str:
        return re.sub(rf"(?m)^({counter}{{.*}}) (.*)$", lambda m: f"{m[1]} {float(m[2]) / 2}", page)

    stuck = changed(tmp_path, "kv_cascade_base", lambda all_of_it: rewriting.changed(all_of_it, fewer))
    (server,) = verified(stuck, "kv_cascade_base").servers
    assert server.loads[0].arrivals == pytest.approx(server.loads[1].arrivals, rel=0.05)
    assert server.loads[0].prompts.mean == pytest.approx(server.loads[1].prompts.mean)


def test_a_page_without_queue_metrics_leaves_the_load_unmeasured(tmp_path: Path) -> None:
    def without(page: str) -> str:
        return "\n".join(each for each in page.split("\n") if not each.startswith("vllm:num_requests_waiting"))

    before = changed(tmp_path, "contention_bigbatch", lambda all_of_it: rewriting.changed(all_of_it, without))
    found = verified(before, "healthy")
    assert (found.verdict, "the load before the change was not measured" in line_1(found)) == ("not comparable", True)


def changed(
    tmp_path: Path, name: str, change: Callable[[Iterable[rewriting.Scrape]], Iterable[rewriting.Scrape]]
) -> Path:
    """A recording changed scrape by scrape, with all that is known of it beside its pages."""
    folder = rewriting.write(tmp_path / "changed", change(rewriting.scrapes(name)))
    shutil.copy(RECORDINGS / name / "recording.toml", folder)
    return folder


def behind_a_gateway(tmp_path: Path, capped: str) -> Path:
    """A server that was capped as if a gateway did it: as many run, the others wait where no page shows them."""

    def held_back(page: str) -> str:
        return re.sub(r"(?m)^(vllm:num_requests_waiting.*) .*$", r"\1 0", page)

    folder = changed(tmp_path, capped, lambda all_of_it: rewriting.changed(all_of_it, held_back))
    shutil.copy(RECORDINGS / "kv_cascade_base" / "recording.toml", folder)
    return folder


def test_the_gateway_limit_that_was_proposed_is_the_change(tmp_path: Path) -> None:
    found = verified("kv_cascade_base", behind_a_gateway(tmp_path, "cure_max_num_seqs_mean"))
    assert line_1(found).startswith("FIXED, WITH TRADE-OFFS kv_eviction_cascade")
    assert "output tokens / s 1,375 -> 884" in line_1(found)
    assert "requests beyond 6 wait at the gateway" in line_1(found)
    (server,) = found.servers
    assert [(each.name, each.before, each.after) for each in server.changes] == [
        ("gateway concurrency limit", None, "6")
    ]
    assert server.first is not None
    (applied,) = server.first.applied_fixes
    assert (applied.name, applied.proposed) == ("gateway concurrency limit", "6")
    assert applied.fix.value == requests_that_fit_kv_cache
    (outside,) = (note for note in server.notes if "Little's law" in note)
    assert "the 28 requests of before were always in flight (closed-loop clients): 22 of them wait" in outside


def test_the_limit_is_recognized_while_the_queue_of_before_drains(tmp_path: Path) -> None:
    limited = list(rewriting.scrapes(behind_a_gateway(tmp_path, "cure_max_num_seqs_mean")))
    queue = re.compile(r"(?m)^(vllm:num_requests_waiting\{.*) .*$")
    draining = [
        (time, instance, queue.sub(rf"\1 {max(22 - 2 * at, 0)}", page))
        for at, (time, instance, page) in enumerate(limited)
    ]
    (server,) = verified("kv_cascade_base", rewriting.write(tmp_path / "draining", draining)).servers
    assert [change.name for change in server.changes if change.known] == ["gateway concurrency limit"]
    assert "the queue of before was in the server for the first 22 s of AFTER" in server.notes


def test_fewer_requests_in_flight_than_the_proposed_limit_are_a_lighter_load(tmp_path: Path) -> None:
    found = verified("kv_cascade_base", behind_a_gateway(tmp_path, "cure_max_num_seqs_p90"))
    assert found.verdict == "not comparable"
    assert "the load differs: 27.8 -> 3 requests in flight of closed-loop clients, arrivals 3.83 -> 1.94" in line_1(
        found
    )


def test_idle_before_is_reported() -> None:
    assert "BEFORE was idle, without a request in flight in any scrape" in line_1(verified("idle", "healthy"))


def test_idle_after_asks_for_the_load_of_before() -> None:
    head = line_1(verified("kv_cascade_base", "idle"))
    assert "no request is in flight; observe it under the load of BEFORE" in head
    assert "--probe" not in head


def test_a_different_model_is_not_comparable(tmp_path: Path) -> None:
    other = changed(
        tmp_path,
        "cure_max_num_seqs_mean",
        lambda all_of_it: rewriting.changed(all_of_it, lambda page: rewriting.of_model(page, "other")),
    )
    found = verified("kv_cascade_base", other)
    assert found.verdict == "not comparable"
    assert "a different model is served: tiny -> other" in line_1(found)


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_restart_during_the_observation_is_not_comparable(tmp_path: Path, side: str) -> None:
    def restarted(all_of_it: Iterable[rewriting.Scrape]) -> Iterable[rewriting.Scrape]:
        for at, (time, instance, page) in enumerate(all_of_it):
            lines = (
                f"process_start_time_seconds {1 + (at > 20)}" if each.startswith("process_start") else each
                for each in page.split("\n")
            )
            yield time, instance, "\n".join(lines)

    names = {"before": "kv_cascade_base", "after": "cure_max_num_seqs_mean"}
    spoilt: dict[str, str | Path] = {**names, side: changed(tmp_path, names[side], restarted)}
    found = verified(spoilt["before"], spoilt["after"])
    assert found.verdict == "not comparable"
    assert f"the server restarted during the observation {side} the change" in line_1(found)


@pytest.mark.parametrize("after", ["cure_max_num_seqs_mean", "cure_max_num_seqs_p90"])
def test_a_symptom_that_is_no_longer_measured_is_not_comparable(tmp_path: Path, after: str) -> None:
    """The second incident is known to be absent, because the KV cache is not full."""

    def without(page: str) -> str:
        return "\n".join(each for each in page.split("\n") if "num_preemptions" not in each)

    found = verified(
        "kv_cascade_base", changed(tmp_path, after, lambda all_of_it: rewriting.changed(all_of_it, without))
    )
    assert found.verdict == "not comparable"
    assert "not measured after the change: preemptions / finished request" in line_1(found)


def test_server_that_responds_for_the_first_time_is_fixed_without_a_log(tmp_path: Path) -> None:
    found = verified("startup_crash_blocksize16", rewriting.pages_alone(tmp_path, "healthy"))
    assert (found.verdict, found.servers[0].outcomes[0].because) == ("fixed", "the server responds now")


def test_symptoms_that_persist_under_another_incident_are_not_fixed(tmp_path: Path) -> None:
    """Fewer than four run, which would be a pool too small; evictions, full pool and queue are as before."""

    def few(page: str) -> str:
        return re.sub(r"(?m)^(vllm:num_requests_running\{.*) (.*)$", lambda m: f"{m[1]} {float(m[2]) / 3}", page)

    after = changed(tmp_path, "kv_cascade_base", lambda all_of_it: rewriting.changed(all_of_it, few))
    found = verified("kv_cascade_base", after)
    assert (found.verdict, "under another incident" in line_1(found)) == ("no effect", True)


def told(side: Snapshot, incident: str, change: Callable[[Diagnosis], Diagnosis]) -> Snapshot:
    """A look in which one incident was judged otherwise."""
    findings = (
        each._replace(diagnosis=change(each.diagnosis)) if each.diagnosis.incident.id == incident else each
        for each in side.report.findings
    )
    return side._replace(report=side.report._replace(findings=tuple(findings)))


def test_an_intermittent_incident_that_had_ended_before_is_fixed() -> None:
    """A stall that came twice would have come again."""

    def twice(one: Diagnosis) -> Diagnosis:
        symptoms = tuple(each._replace(history=each.history[:] * 2) for each in one.symptoms)
        return one._replace(symptoms=symptoms, instants=one.instants * 2)

    before = told(snapshot(RECORDINGS / "engine_stalled"), "engine_stalled", twice)
    assert compare(before, snapshot(RECORDINGS / "healthy")).verdict == "fixed"


def part(tmp_path: Path, name: str, begin: int, end: int) -> Path:
    """So many pages of a recording, with all that is known of it beside them."""
    return changed(tmp_path, name, lambda all_of_it: list(all_of_it)[begin:end])


@pytest.mark.parametrize(("begin", "end"), [(17, 20), (36, 40)])
def test_an_observation_shorter_than_the_window_proves_nothing(tmp_path: Path, begin: int, end: int) -> None:
    found = verified("kv_cascade", part(tmp_path, "kv_cascade", begin, end))
    assert (found.verdict, "observe the server for 30 s" in line_1(found)) == ("not comparable", True)
    assert "trade-offs" not in line_1(found)


def test_an_intermittent_incident_needs_an_observation_as_long_as_its_pauses() -> None:
    def again(one: Diagnosis) -> Diagnosis:
        symptoms = tuple(each._replace(history=each.history[:] * 2) for each in one.symptoms)
        later = tuple(each + 3600 for each in one.instants)
        return one._replace(symptoms=symptoms, instants=one.instants + later)

    found = compare(
        told(snapshot(RECORDINGS / "engine_stalled"), "engine_stalled", again), snapshot(RECORDINGS / "healthy")
    )
    assert (found.verdict, "it recurred after up to 60 min" in line_1(found)) == ("not comparable", True)


@pytest.mark.parametrize(
    ("name", "end"), [("contention_bigbatch", 12), ("contention_bigbatch", 20), ("prefix_unique", 17)]
)
def test_a_shorter_observation_of_the_same_run_shows_no_change(tmp_path: Path, name: str, end: int) -> None:
    """Counts grow with the window, and requests that finish are no symptom."""
    piece = part(tmp_path, name, 0, end)
    assert verified(name, piece).verdict in ("no effect", "not comparable")
    assert verified(piece, name).verdict in ("no effect", "not comparable")


def test_a_maximum_is_not_compared_with_that_of_a_longer_observation(tmp_path: Path) -> None:
    (server,) = verified(part(tmp_path, "cure_max_num_seqs_mean", 0, 14), "cure_max_num_seqs_mean").servers
    assert {each.name: each.change for each in server.user_metrics}["ITL (maximum)"] == "unknown"


def test_lora_adapters_are_no_different_model(tmp_path: Path) -> None:
    assert verified("lora_thrash", part(tmp_path, "lora_thrash", 10, 30)).verdict == "no effect"


@pytest.mark.parametrize(
    "line",
    [
        'vllm:time_to_first_token_seconds_bucket{engine="0",model_name="tiny"} 3',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="abc",model_name="tiny"} 3',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="-Inf",model_name="tiny"} 3',
        "diag_vllm_config 12",
        'vllm:num_requests_waiting{engine="0",model_name="other"} +Inf',
        'vllm:num_requests_running{engine="1",model_name="tiny"} 1e308',
        'vllm:num_requests_running{engine="1",model_name="tiny"} +Inf',
        'vllm:generation_tokens_total{engine="1",model_name="tiny"} +Inf',
    ],
)
def test_malformed_series_break_nothing(tmp_path: Path, line: str) -> None:
    odd = changed(
        tmp_path, "kv_cascade_base", lambda all_of_it: rewriting.changed(all_of_it, lambda page: f"{page}{line}\n")
    )
    for found in (verified(odd, "cure_max_num_seqs_mean"), verified("kv_cascade_base", odd)):
        SCHEMA.validate(json.loads(report.DOCUMENT.text(found)))


def test_persisting_critical_incident_decides_over_an_ended_one(tmp_path: Path) -> None:
    def beside(gpu: Beside, name: str) -> Path:
        start = BASE[0][0]
        return rewriting.write(
            tmp_path / name, [(t, at, page + scenarios.text(t - start, page, (gpu,))) for t, at, page in BASE]
        )

    found = verified(beside(hot(900e6), "hot"), beside(gpu(), "cool"))
    (server,) = found.servers
    assert {each.before.incident.id: each.verdict for each in server.outcomes}["gpu_thermal_throttling"] == "fixed"
    assert {each.before.severity for each in server.outcomes} == {"critical"}
    assert (found.verdict, line_1(found).split()[2]) == ("no effect", "kv_eviction_cascade")


@pytest.mark.parametrize(
    ("before", "after", "verdict", "heads"),
    [
        ("healthy", "healthy", "fixed", ["FIXED, WITH TRADE-OFFS kv_eviction_cascade on r0:8000"]),
        (
            "",
            "healthy",
            "not comparable",
            ["NOT COMPARABLE r1:8000: the state before the change is unknown", "FIXED, WITH TRADE-OFFS"],
        ),
        ("healthy", "engine_dead", "worse", ["WORSE r1:8000", "FIXED, WITH TRADE-OFFS"]),
        ("healthy", "startup_hang", "not comparable", ["NOT COMPARABLE r1:8000", "FIXED, WITH TRADE-OFFS"]),
    ],
)
def test_the_verdict_with_a_second_server(
    tmp_path: Path, before: str, after: str, verdict: str, heads: list[str]
) -> None:
    """A healthy replica is no reason not to compare, one that nobody saw is, one that died is worse."""

    def both(one: str, other: str, when: str) -> Path:
        of_another = rewriting.changed(
            rewriting.scrapes(other or "healthy"), lambda page: rewriting.of_model(page, "m")
        )
        beside = ((t, at, page if other else "") for t, at, page in of_another)
        return rewriting.write(tmp_path / when, rewriting.side_by_side(rewriting.scrapes(one), beside))

    found = verified(both("kv_cascade_base", before, "before"), both("cure_max_num_seqs_mean", after, "after"))
    assert found.verdict == verdict
    for head, begins in zip(report.headlines(found), heads, strict=True):
        assert head.startswith(begins)


def test_missing_telemetry_of_one_server_is_not_reported_for_another(tmp_path: Path) -> None:
    blind = ((t, at, "") for t, at, _ in rewriting.scrapes("healthy"))
    one = rewriting.write(tmp_path / "one", rewriting.side_by_side(rewriting.scrapes("healthy"), blind))
    (server, _) = verified(one, one).servers
    assert (server.before, server.unknown_before != ()) == ("r1:8000", True)
    assert not any("r0:8000" in each for each in report.headlines(verified(one, one)))


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [("critical", "warning", "fixed"), ("critical", "critical", "no effect"), ("warning", "critical", "worse")],
)
def test_a_new_incident_is_weighed_by_its_severity(before: Severity, after: Severity, verdict: str) -> None:
    cascade = told(
        snapshot(RECORDINGS / "kv_cascade_base"), "kv_eviction_cascade", lambda one: one._replace(severity=before)
    )
    queue = told(
        snapshot(RECORDINGS / "cure_max_num_seqs_p90"), "queue_saturation", lambda one: one._replace(severity=after)
    )
    assert compare(cascade, queue).verdict == verdict


def test_an_explained_incident_does_not_count_as_new() -> None:
    queue = told(
        snapshot(RECORDINGS / "cure_max_num_seqs_p90"),
        "queue_saturation",
        lambda one: one._replace(severity="critical", explained_by="something"),
    )
    assert compare(snapshot(RECORDINGS / "kv_cascade_base"), queue).verdict == "fixed"


def test_servers_are_matched_by_name_where_there_are_several(tmp_path: Path) -> None:
    def both(name: str, *instances: str) -> Path:
        pages = [(time, each, page) for time, _, page in rewriting.scrapes(name) for each in instances]
        return rewriting.write(tmp_path / f"{name}-{'-'.join(instances)}".replace(":", "_"), pages)

    found = verified(both("kv_cascade_base", "a:1", "b:1"), both("cure_watermark", "b:1", "c:1"))
    assert [each.before for each in found.servers] == ["b:1"]
    assert found.unmatched == ("a:1 is missing after the change", "c:1 was missing before the change")
    assert (found.servers[0].verdict, found.verdict) == ("better", "not comparable")


def test_an_after_that_is_older_than_before_is_noted() -> None:
    (server,) = verified("kv_cascade_base", "cure_max_num_seqs_mean").servers
    assert "AFTER was observed earlier than BEFORE: check the order of the two arguments" in server.notes


# -- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "span"),
    [(0.5, Bounds(1.0, 2.0)), (0.75, Bounds(1.0, 2.0)), (0.76, Bounds(2.0, math.inf)), (1.0, Bounds(2.0, math.inf))],
)
def test_a_quantile_is_known_up_to_its_bucket(share: float, span: Bounds) -> None:
    assert bucket(share, [(math.inf, 8), (1.0, 2), (2.0, 6)]) == span


def test_a_histogram_without_counts_has_no_quantile() -> None:
    assert bucket(0.5, [(1.0, 0.0), (math.inf, 0.0)]) is None
    assert bucket(0.5, []) is None


def test_the_effects_of_the_applied_fix_come_first() -> None:
    incident = snapshot(RECORDINGS / "kv_cascade_base").report.present[0].diagnosis.incident
    promise = requests_running.at_least(6, judged("for the test"))
    waits = preemptions_felt.at_most(3, judged("for the test"))
    fix = incident.fixes[0]._replace(expects=(promise, waits))
    conditions = expected(incident, [AppliedFix(fix, "")])
    assert conditions[:2] == (promise, waits)
    assert [each.op for each in conditions[2:]] == ["<=", "<="]
    assert len({each.signal for each in conditions}) == len(conditions)


@pytest.mark.parametrize("incident", load(), ids=lambda each: each.id)
def test_minimum_traffic_is_no_expected_condition(incident: Incident) -> None:
    told = expected(incident, ())
    assert told
    assert not {each.signal for each in told} & {*WORK}


def test_events_are_counted_over_windows_of_one_length(tmp_path: Path) -> None:
    """Scrapes ten times as far apart are judged over the alert's window and count a tenth of the events."""
    pages = list(rewriting.scrapes("contention_bigbatch"))
    slow = [(pages[0][0] + 10 * (time - pages[0][0]), at, page) for time, at, page in pages]
    sides = snapshot(RECORDINGS / "contention_bigbatch"), snapshot(rewriting.write(tmp_path / "slow", slow))
    one = sides[0].report.present[0].diagnosis
    servers = [side.server(side.instances[0]) for side in sides]
    (events,) = (
        each
        for each in signal_deltas(one, expected(one.incident, ()), *servers)
        if each.condition.signal == prefills_in_pauses
    )
    assert events.before
    assert events.after is not None
    assert events.after < 0.3 * events.before


@pytest.mark.parametrize(("before", "after", "way"), [(1.2, 0.6, 0.5), (0.6, 1.2, -0.5), (0.0, 0.0, 0.0)])
def test_improvement_of_a_signal_is_relative_to_its_threshold(before: float, after: float, way: float) -> None:
    condition = requests_running.at_most(0.2, judged("for the test"))
    assert SignalDelta(condition, 0.2, before, after).improvement == pytest.approx(way)
    opposite = requests_running.at_least(0.2, judged("for the test"))
    assert SignalDelta(opposite, 0.2, before, after).improvement == pytest.approx(-way)


# -- as a user types it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["cure_max_num_seqs_mean"], 0, "FIXED, WITH TRADE-OFFS"),
        (["cure_watermark"], 1, "BETTER"),
        (["kv_cascade_base"], 1, "NO EFFECT"),
        (["idle"], 3, "NOT COMPARABLE"),
    ],
)
def test_the_exit_status_is_the_verdict(words: list[str], status: int, sentence: str) -> None:
    done = diag("verify", *(f"tests/recordings/{each}" for each in ("kv_cascade_base", *words)))
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.startswith(sentence)


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        ([], 64, "Missing argument 'BEFORE'"),
        (
            ["http://127.0.0.1:9"],
            64,
            "is a live server, which cannot show its past; run diag record URL DIR",
        ),
        (
            ["http://me:pass@127.0.0.1:9", "127.0.0.1:9"],
            64,
            "BEFORE must be a recording: http://127.0.0.1:9 is a live server",
        ),
        (["nowhere"], 64, "BEFORE must be a recording: http://nowhere:80 is a live server"),
        (["\x1b[31mred", "other"], 64, "\\x1b[31mred has no valid host name"),
        (["tests/recordings/kv_cascade", "127.0.0.1:9"], 69, "cannot connect to http://127.0.0.1:9"),
        (["tests/recordings/kv_cascade"], 69, "BEFORE was recorded there: if the server has moved, give AFTER"),
        (["README.md", "tests/recordings/healthy"], 64, "it was not written by `diag record`"),
        (
            ["tests/recordings/healthy", "tests/recordings/healthy", "--json", "--markdown"],
            64,
            "exclude each other: choose one",
        ),
    ],
)
def test_a_usage_error_is_one_sentence(words: list[str], status: int, sentence: str) -> None:
    done = diag("verify", *words)
    assert (done.returncode, done.stdout) == (status, "")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1 or "Missing argument" in sentence  # which also shows two examples
    assert "pass" not in done.stderr
    assert "\x1b" not in done.stderr


def test_a_name_with_escapes_reaches_no_terminal(tmp_path: Path) -> None:
    evil = "a\x1b[31m|:1"
    pages = [(time, evil, page) for time, _, page in rewriting.scrapes("kv_cascade_base")]
    found = verified(rewriting.write(tmp_path / "evil", pages), "cure_watermark")
    for text in (report.render(found), report.render_markdown(found)):
        assert "\x1b" not in text
    assert "\\|" in report.render_markdown(found)


def test_without_after_the_servers_of_before_are_scraped_now(tmp_path: Path) -> None:
    """The pages of a server with a watermark, eight times as fast as they were recorded."""
    replies = [Reply(page.encode()) for _, _, page in rewriting.scrapes("cure_watermark")]
    with serving(on_metrics(*replies)) as server:
        pages = ((time, server.instance, page) for time, _, page in rewriting.scrapes("kv_cascade_base"))
        before = rewriting.write(tmp_path / "before", pages)
        found = verifying.verify(str(before), ObserveOptions([], every=0.25, duration=0.25 * len(replies)))
    assert (found.after.observed.source, found.after.observed.target) == ("scrape", server.url)
    assert found.verdict == "better"


def test_one_live_server_is_not_before_and_after() -> None:
    with pytest.raises(BadUsage, match="run diag record URL DIR before the change"):
        verifying.verify("http://localhost:1/metrics", ObserveOptions(["localhost:1"]))


def test_rows_that_do_not_fit_keep_the_indent_of_their_section() -> None:
    text = report.render(verified("kv_cascade", "healthy_after_cascade"))
    rows = text.partition("  signals ")[2].partition("  user-visible ")[0].splitlines()
    assert len(rows) > 2
    assert all(row.startswith(" " * 19) for row in rows[1:])
