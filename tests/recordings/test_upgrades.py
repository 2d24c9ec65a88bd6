"""A release is called slower where the same load shows it; where the load explains it, or may, nobody is blamed."""

import random
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support import rewriting, upgrades
from support.sampling import some
from support.simulated_vllm import Engine, Limits, Request, page
from support.upgrades import START

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.diagnose import Diagnosis
from diag.report import terminal

SLOWER: dict[str, dict[str, float]] = {
    "as fast": {"slower": 1.0},
    "within what differs from hour to hour": {"slower": 1.2},
    "as slow as more clients explain": {"slower": 1.5, "load": 1.5},
    "an open loop, whose requests pile up where tokens take longer": {"slower": 1.6, "open_loop": True},
    "longer prompts": {"slower": 1.6, "prompt_tokens_total": 3.0},
}
CANNOT_TELL = tuple(SLOWER)[2:]


def judged(folder: Path, pages: list[rewriting.Scrape]) -> Diagnosis:
    report = doctor.run(ObserveOptions([str(rewriting.write(folder, pages))]))
    return next(each.diagnosis for each in report.findings if each.diagnosis.incident.id == "version_regression")


def test_the_slower_release_is_named_with_its_factor_and_the_settings_that_changed(tmp_path: Path) -> None:
    found = judged(tmp_path, list(upgrades.scrapes(1.6)))
    assert (found.state, found.culprits) == ("present", ("ITL 1.6x that of 1h ago", "vLLM 0.32.0"))
    assert found.supports[0].culprits == ("enforce_eager",)


@pytest.mark.parametrize(("slower", "state"), [(1.5, "present"), (1.1, "absent")])
def test_a_slower_release_holds_more_requests_of_the_same_load(tmp_path: Path, slower: float, state: str) -> None:
    """Requests arrive as before, and each takes longer: three quarters more run at once."""
    pages, limits = [], Limits()
    for release, begun, factor in (("0.31.0", 0, 1.0), ("0.32.0", 2700, slower)):
        engine = Engine(replace(limits, step=factor * limits.step, each=factor * limits.each), START + begun)
        draw, at = random.Random(begun), begun
        while (at := at + draw.expovariate(1.5)) < begun + 2500:
            engine.send(Request(START + at, 400, draw.randint(100, 300)))
        for at in range(begun + 30, begun + 2500, 30):
            engine.run(START + at)
            text = page([engine]) + f'diag_vllm_info{{version="{release}",model="tiny",device="cuda"}} 1\n'
            pages.append((START + at, "vllm-0:9400", text))
    found = judged(tmp_path, pages)
    assert (found.state, found.since) == (state, START + 2700 if state == "present" else None)


def test_a_queue_that_is_served_more_slowly_is_named_by_its_throughput(tmp_path: Path) -> None:
    """The batch is full, each request is as fast as before, and fewer requests fit."""
    pages = list(upgrades.scrapes(1.5, inter_token_latency_seconds_sum=1.0))
    waits = [(at, host, rewriting.with_value(page, "vllm:num_requests_waiting{", "5")) for at, host, page in pages]
    assert judged(tmp_path, waits).culprits[0].startswith("time per output token of the whole server 1.5")


@pytest.mark.parametrize("name", some(SLOWER, 2))
def test_slower_release_under_more_load_is_no_regression(tmp_path: Path, name: str) -> None:
    changes = SLOWER[name]
    pages = upgrades.scrapes(**changes)  # type: ignore[arg-type]
    assert judged(tmp_path, list(pages)).state == ("unknown" if name in CANNOT_TELL else "absent")


def test_an_upgrade_24_minutes_after_the_recording_began_is_judged(tmp_path: Path) -> None:
    pages = list(upgrades.scrapes(1.6))[upgrades.UPGRADE - 24 : upgrades.UPGRADE + 30]
    assert judged(tmp_path, pages).state == "present"


def test_an_upgrade_without_a_time_before_it_to_compare_is_unknown(tmp_path: Path) -> None:
    pages = list(upgrades.scrapes(1.6))[upgrades.UPGRADE - 5 : upgrades.UPGRADE + 22]
    assert judged(tmp_path, pages).state == "unknown"


def test_a_restart_of_the_same_release_is_no_upgrade(tmp_path: Path) -> None:
    pages = [(at, host, page.replace("0.31.0", "0.32.0")) for at, host, page in upgrades.scrapes(1.6)]
    assert judged(tmp_path, pages).state == "absent"


@pytest.mark.parametrize(
    ("after", "lacks", "state"),
    [("0.32.0", 0, "present"), ("0.31.0", 0, "absent"), ("0.32.0", 2, "present"), ("0.31.0", 2, "absent")],
)
def test_the_starts_in_a_log_name_the_releases(tmp_path: Path, after: str, lacks: int, state: str) -> None:
    """The pages name none, and recording.toml the one that ran when it was written; a log may lack its first start."""
    begun = {upgrades.START - 60: "0.31.0", upgrades.START + upgrades.EVERY * upgrades.UPGRADE: after}
    named = re.compile(r"diag_vllm_info[^\n]*\n")
    pages = [(at, host, named.sub("", page)) for at, host, page in upgrades.scrapes(1.6)]
    lines = [
        f"(APIServer pid=7) INFO {datetime.fromtimestamp(at, UTC):%m-%d %H:%M:%S} {text}"
        for at, name in begun.items()
        for text in (
            f"[api_server.py:1977] vLLM API server version {name}",
            "[api_server.py:1346] Starting vLLM server on :8000",
        )
    ]
    lines.insert(2, "INFO:     Finished server process [7]")
    folder = rewriting.write(tmp_path, pages)
    (folder / "server.log").write_text("\n".join(lines[lacks:]) + "\n")
    (folder / "recording.toml").write_text('vllm = "0.31.0"\nscrape_interval_seconds = 60.0\n')
    report = doctor.run(ObserveOptions([str(folder)]))
    found = next(each.diagnosis for each in report.findings if each.diagnosis.incident.id == "version_regression")
    assert (found.state, f"vLLM {after}" in terminal.render(report)) == (state, True)
