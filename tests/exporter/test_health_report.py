"""GET /health_report: the report of the exporter's own scrapes, in the form that machines read."""

import json
import time
from pathlib import Path

import pytest
from support.bad_servers import PAGE, closed_port
from support.rewriting import scrapes
from support.schemas import validator

from diag.commands import exporter as work
from diag.commands.exporter import Exporter, ExporterOptions, LivenessThread
from diag.commands.observe import judge_observation, site
from diag.core.contract import PUBLISHED
from diag.diagnosis.progress import Liveness
from diag.report import json as as_json

SCHEMA = Path(as_json.__file__).parent / "diag.health_report.schema.json"


@pytest.mark.parametrize(
    ("recording", "status", "present"),
    [
        ("kv_cascade", "red", "kv_eviction_cascade"),
        ("queue_saturation", "yellow", "queue_saturation"),
        ("healthy", "green", ""),
    ],
)
def test_it_says_what_doctor_says(recording: str, status: str, present: str) -> None:
    contract, incidents = site(None, None)
    liveness = Liveness("server:8000", 2.0)
    for at, _, page in scrapes(recording):
        liveness.observe(round(1000 * at), page.encode())
    report = judge_observation(liveness.seen(), contract, incidents).report
    content = json.loads(as_json.render_health(report, contract.site))
    validator(SCHEMA).validate(content)
    assert (content["server"], content["status"]) == ("server:8000", status)
    assert next(iter(content["indicators"]), "") == present
    if present:
        (diagnosis,) = content["indicators"][present]["diagnosis"]
        assert (
            diagnosis["help_url"] == PUBLISHED.replace("{page}", present) and diagnosis["action"] and diagnosis["cause"]
        )


def test_before_the_first_scrape_it_cannot_tell() -> None:
    exporter = Exporter(ExporterOptions(f"http://127.0.0.1:{closed_port()}"))
    answer = exporter.answer("/health_report", 1.0)
    content = json.loads(answer.body)
    validator(SCHEMA).validate(content)
    assert (answer.status, answer.kind, content["status"]) == (200, "application/json", "unknown")


def test_a_report_is_valid_for_fifteen_seconds_however_often_it_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "JUDGED_EVERY", 1.0)
    pages = list[bytes]()

    def page() -> bytes:
        pages.append(PAGE)
        return PAGE

    thread = LivenessThread("server:8000", page)
    while json.loads(first := thread.report())["status"] == "unknown" and len(pages) < 2:
        time.sleep(0.02)
    seen = len(pages)
    while len(pages) < seen + 2:
        assert thread.report() == first
        time.sleep(0.1)
    moment = time.monotonic
    monkeypatch.setattr(work.time, "monotonic", lambda: moment() + 8)
    assert thread.report() == first
    monkeypatch.setattr(work.time, "monotonic", lambda: moment() + 16)
    assert thread.report() != first
