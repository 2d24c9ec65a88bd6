"""KV connectors: transfers that fail or expire, blocks that are never found, and what looks like either and is none."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support import connector_pages as kv
from support import rewriting
from support.scenarios import GIB, Beside, config, found, memory, text

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report

Change = Callable[[str], str]
FAILING, OFFLOAD = "kv_transfer_failing", "kv_offload_ineffective"


def judged(folder: Path, change: Change, recording: str = "healthy") -> Report:
    return doctor.run(ObserveOptions([str(rewriting.write(folder, kv.pages(recording, change)))]))


def state(report: Report, incident: str) -> str:
    """The state on the only subject there is."""
    (diagnosis,) = (each.diagnosis for each in report.findings if each.diagnosis.incident.id == incident)
    return diagnosis.state


def lines(page: str, share: float) -> str:
    """The page of an exporter that follows the log: lines of failed transfers per finished request."""
    finished = kv.value(page, 'vllm:request_success_total{engine="0",finished_reason="length"')
    rows = {"kv_transfer_failed": finished * share // 1, "kv_blocks_expired": 0, "kv_load_failed": 0}
    return page + "".join(f'diag_vllm_log_events_total{{event="{name}"}} {number}\n' for name, number in rows.items())


def unnamed(page: str) -> str:
    """A server with a connector that exports nothing of its own."""
    return kv.asked(page, kv.value(page, "vllm:prompt_tokens_total"), 0.0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda page: kv.decode(page, 0.2), "present"),
        (lambda page: kv.decode(page, 0.0), "absent"),
        (lambda page: kv.prefill(page, 0.2), "present"),
        (lambda page: lines(unnamed(page), 0.3), "present"),
        (lambda page: lines(unnamed(page), 0.0), "absent"),
        (unnamed, "unknown"),
        (lambda page: page, "absent"),
    ],
    ids=[
        "transfers fail",
        "none fails",
        "leases expire",
        "a log of failures",
        "a log without failures",
        "a connector without metrics, and no log",
        "no connector",
    ],
)
def test_failing_kv_transfers_are_reported(tmp_path: Path, change: Change, expected: str) -> None:
    assert state(judged(tmp_path, change), FAILING) == expected


@pytest.mark.parametrize("change", [lambda page: kv.decode(page, 0.02), lambda page: kv.prefill(page, 0.02)])
def test_single_failures_are_no_incident(tmp_path: Path, change: Change) -> None:
    """A client that gives up lets the lease of its prompt expire."""
    assert state(judged(tmp_path, change), FAILING) != "present"


def test_requests_that_fail_are_critical_and_leases_that_expire_are_not(tmp_path: Path) -> None:
    failing = judged(tmp_path / "decode", lambda page: kv.decode(page, 0.2))
    expiring = judged(tmp_path / "prefill", lambda page: kv.prefill(page, 0.2))
    assert (failing.verdict, expiring.verdict) == ("critical", "warning")


def test_expired_kv_blocks_are_reported_with_doubtful_answers(tmp_path: Path) -> None:
    late = judged(tmp_path / "late", lambda page: kv.prefill(page, 0.2, late=0.1))
    assert any("Take answers" in each.text for each in found(late, FAILING).proposals)
    timely = judged(tmp_path / "timely", lambda page: kv.prefill(page, 0.2))
    assert not any("Take answers" in each.text for each in found(timely, FAILING).proposals)


def waiting_for_kv(page: str) -> str:
    """The page of a decode instance that stands still with three requests, none of which has its KV blocks."""
    page = kv.nixl(kv.asked(page, 9000.0, 9000.0))
    page = re.sub(r"^(vllm:num_requests_waiting\{\S*) \S+$", r"\1 3.0", page, flags=re.MULTILINE)
    page = re.sub(r"^(vllm:iteration_tokens_total_count\{\S*) \S+$", r"\1 5000.0", page, flags=re.MULTILINE)
    stages = {"waiting_to_start": 0, "in_progress": 3, "completed_waiting": 0}
    name = "vllm:num_requests_kv_fetch_by_stage"
    return page + "".join(f'{name}{{{kv.LABELS},stage="{stage}"}} {count}.0\n' for stage, count in stages.items())


def test_a_standstill_in_which_all_wait_for_kv_blocks_is_explained_by_their_transfers(tmp_path: Path) -> None:
    report = judged(tmp_path, waiting_for_kv, "idle")
    assert found(report, FAILING).diagnosis.primary
    others = [each.diagnosis for each in report.present if each.diagnosis.incident.id != FAILING]
    assert others and {each.explained_by for each in others} == {FAILING}


def sizeless(page: str) -> str:
    """The page of a release that does not say how much the KV cache holds."""
    return re.sub(r"^vllm:cache_config_info.*\n", "", page, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda page: kv.offload(page, 0.0), "present"),
        (lambda page: kv.offload(page, 0.3), "absent"),
        (lambda page: kv.offload(page, 0.0, before=100_000), "unknown"),
        (lambda page: sizeless(kv.offload(page, 0.0)), "unknown"),
        (lambda page: sizeless(kv.offload(page, 0.0, before=3e6)), "present"),
        (lambda page: kv.prefill(page, 0.0), "unknown"),
        (lambda page: page, "absent"),
    ],
    ids=[
        "never found",
        "found",
        "a cold store",
        "a cold store beside a GPU of unknown size",
        "never found beside a GPU of unknown size",
        "a prefill instance",
        "no connector",
    ],
)
def test_offloading_is_judged_by_stored_and_hit_blocks(tmp_path: Path, change: Change, expected: str) -> None:
    assert state(judged(tmp_path, change), OFFLOAD) == expected


def keys(page: str, **failed: float) -> str:
    """The page of a store that counts keys or objects, of which a share fails."""
    done = kv.value(page, 'vllm:request_success_total{engine="0",finished_reason="length"') * 100
    names = {
        "mooncake": ("vllm:mooncake_store_operation_keys", "vllm:mooncake_store_operation_failed_keys"),
        "umbp": ("vllm:umbp_transfer_submitted", "vllm:umbp_transfer_failed"),
    }
    return kv.offload(page, 0.3) + "".join(
        kv.counter(all_of, "", done) + kv.counter(some, "", done * share // 1)
        for (all_of, some), share in ((names[name], share) for name, share in failed.items())
    )


FAILS = "kv_offload_failing"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda page: kv.tiers(page, cascade_job_failures=0.5), "present"),
        (lambda page: kv.tiers(page, 0.3, promotion_job_failures=0.5), "present"),
        (lambda page: kv.tiers(page, 0.3, promotion_job_failures=0.02), "unknown"),
        (lambda page: kv.tiers(page, 0.3), "absent"),
        (lambda page: kv.tiers(page, 0.3, backpressure_stores_dropped=0.5), "absent"),
        (lambda page: keys(page, mooncake=0.2), "present"),
        (lambda page: keys(page, mooncake=0.02), "absent"),
        (lambda page: keys(page, umbp=0.2), "present"),
        (lambda page: kv.decode(page, 0.0), "absent"),
        (unnamed, "unknown"),
        (lambda page: page, "absent"),
    ],
    ids=[
        "cascades fail",
        "promotions fail",
        "single failures",
        "none fails",
        "back-pressure",
        "keys fail",
        "single keys",
        "objects fail",
        "transfers only",
        "a connector without metrics",
        "no connector",
    ],
)
def test_failing_offloads_are_reported(tmp_path: Path, change: Change, expected: str) -> None:
    assert state(judged(tmp_path, change), FAILS) == expected


def test_a_failing_tier_is_named_and_explains_that_nothing_is_found(tmp_path: Path) -> None:
    report = judged(tmp_path, lambda page: kv.tiers(page, cascade_job_failures=0.5, backpressure_stores_dropped=0.5))
    finding = found(report, FAILS)
    assert "cascade of a tier" in str(finding)
    assert "a slow tier" in str(finding)
    assert found(report, OFFLOAD).diagnosis.explained_by == FAILS


OVERSIZED = "kv_offload_oversized"
HALF_OF_THE_RANKS = (lambda _: [("diag_vllm_processes", ("worker",), 8.0)], config(tensor_parallel_size=16))
TWO_ENGINES = (lambda _: [("diag_vllm_processes", ("engine",), 2.0)],)
CONNECTOR = (
    """vllm serve m --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both","""
    f""" "kv_connector_extra_config": {{"cpu_bytes_to_use": {96 * GIB:.0f}}}}}'"""
)


def buffered(folder: Path, change: Change, *beside: Beside, launch: str = "") -> Report:
    """A server with a buffer for offloaded KV blocks, and what stands beside its page."""
    scrapes = list(kv.pages("healthy", change))
    pages = ((at, host, page + text(at - scrapes[0][0], page, beside)) for at, host, page in scrapes)
    return doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", pages))], launch=launch))


@pytest.mark.parametrize(
    ("size", "backend", "beside", "launch", "expected"),
    [
        (96, "native", (), "", "present"),
        (40, "native", (), "", "absent"),
        ("None", "native", (), "", "absent"),
        (96, "lmcache", (), "", "absent"),
        (96, "native", HALF_OF_THE_RANKS, "", "absent"),
        (40, "native", TWO_ENGINES, "", "present"),
        ("None", "native", (), CONNECTOR, "present"),
    ],
    ids=["oversized", "fits", "none", "LMCache", "two hosts", "two engines", "a connector's bytes"],
)
def test_a_buffer_above_the_hosts_memory_is_reported(
    tmp_path: Path, size: object, backend: str, beside: tuple[Beside, ...], launch: str, expected: str
) -> None:
    """The host has 64 GiB, of which 80 % hold 1.92 times the proposed size (vllm#53042)."""
    of_host = memory(lambda _: 0.45)
    report = buffered(tmp_path, lambda page: kv.buffered(page, size, backend), of_host, *beside, launch=launch)
    assert state(report, OVERSIZED) == expected
    if expected == "present":
        change = found(report, OVERSIZED).proposals[0].changes[0]
        assert (change.name, change.after) == ("--kv-offloading-size", 13 if beside else 27)


def test_a_buffer_is_unknown_without_the_hosts_memory(tmp_path: Path) -> None:
    assert state(buffered(tmp_path / "some", lambda page: kv.buffered(page, 96)), OVERSIZED) == "unknown"
    assert state(buffered(tmp_path / "none", str), OVERSIZED) == "absent"


def test_host_memory_that_runs_out_gives_back_a_large_buffer(tmp_path: Path) -> None:
    """40 GiB, less what is in use above 80 % of 64 GiB."""
    report = buffered(tmp_path, lambda page: kv.buffered(page, 40), memory(lambda t: 0.93 + 0.0005 * t))
    change = next(each.changes[0] for each in found(report, "host_memory_exhausted").proposals if each.changes)
    assert (change.name, change.after) == ("--kv-offloading-size", 30)
