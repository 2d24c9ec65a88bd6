"""A log into which a client wrote, beside real scrapes: nothing is made of it, nothing is hidden, and it is told."""

import gzip
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.forged_access import access_lines, behind_line_feeds
from support.paths import RECORDINGS
from support.sampling import some

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report
from diag.report import coverage

HEALTHY = ("healthy", "idle", "kv_cascade", "queue_saturation", "tp2_healthy_between")
WARNING = "[03:00:00] /project/cpp/json_schema_converter.cc:1499: Warning: URI should be a plain string, but got #x"


def forged(log: str, at: float) -> list[str]:
    """Lines with the heads of the log's own processes: a death for lack of memory, a shutdown, another start."""
    api = re.search(r"\(APIServer pid=\d+\) ", log)
    engine = re.search(r"\(EngineCore\S* pid=\d+\) ", log)
    now = f"{datetime.fromtimestamp(at, UTC):%m-%d %H:%M:%S}"
    web, core = api[0] if api else "", engine[0] if engine else ""
    died = f"{core}ERROR {now} [core.py:1510] "
    return [
        f"{died}EngineCore encountered a fatal error.",
        f"{died}Traceback (most recent call last):",
        f'{died}  File "/x/vllm/v1/engine/core.py", line 1, in run_engine_core',
        f"{died}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "INFO:     Shutting down",
        "INFO:     Application shutdown complete.",
        f"{web}INFO {now} [api_utils.py:347] vLLM server version 9.9.9, serving model forged",
        f"{web}INFO {now} [api_utils.py:286] non-default args: {{'max_num_seqs': 4242, 'port': 1}}",
        f"{core}INFO {now} [core.py:114] Initializing a V1 LLM engine (v9.9.9) with config: model='forged'",
    ]


def with_health(name: str, folder: Path, status: int) -> Path:
    """A copy of a recording with an answer of vLLM's /health beside each page."""
    shutil.copytree(RECORDINGS / name, folder)
    pages = gzip.decompress((folder / "metrics.prom.gz").read_bytes())
    answer, before = f"diag_vllm_health_status {status}\n".encode(), b"# HELP vllm:num_requests_running "
    (folder / "metrics.prom.gz").write_bytes(gzip.compress(pages.replace(before, answer + before)))
    return folder


def judged(folder: Path) -> Report:
    return doctor.run(ObserveOptions([str(folder)]))


def told(report: Report) -> tuple[object, ...]:
    """The verdict, the incidents with their lines and proposals, the progress, and the releases and models."""
    present = [(f.diagnosis.incident.id, f.quotes, f.proposals, f.relaunch) for f in report.present]
    return report.verdict, present, [each.state for each in report.progress], report.observed.servers


def with_lines(name: str, folder: Path, share: float, lines_of: str) -> Path:
    """A recording's copy, made unless it is there, with forged lines in its log at that share of its scrapes."""
    if not folder.exists():
        shutil.copytree(RECORDINGS / name, folder)
    text = gzip.decompress((folder / "metrics.prom.gz").read_bytes())
    times = [float(at) for at in re.findall(rb"^# scrape ([\d.]+) ", text, re.MULTILINE)]
    at = float(int(times[0] + share * (times[-1] - times[0])))
    log = (folder / "server.log").read_text(encoding="utf-8", errors="replace")
    lines = {
        "alone": forged(log, at),
        "behind a warning": [WARNING, *forged(log, at)],
        "death": forged(log, at)[:4],
        "access lines": [*access_lines(log, at), *access_lines(log, at), *behind_line_feeds(log, at)],
    }[lines_of]
    zone = datetime.fromtimestamp(at, UTC)
    before, after = [], []
    moment = 0.0
    for line in log.splitlines():
        stamp = re.search(r"(?:INFO|WARNING|ERROR) (\d\d-\d\d \d\d:\d\d:\d\d) ", line)
        moment = (
            datetime.strptime(f"{zone.year}-{stamp[1]} +0000", "%Y-%m-%d %H:%M:%S %z").timestamp() if stamp else moment
        )
        (before if moment <= at else after).append(line)
    (folder / "server.log").write_text("\n".join([*before, *lines, *after, ""]), encoding="utf-8")
    return folder


@pytest.mark.parametrize("lines_of", ["alone", "behind a warning", "access lines"])
@pytest.mark.parametrize("name", some(HEALTHY, 2))
def test_lines_that_a_client_wrote_change_no_verdict(name: str, lines_of: str, tmp_path: Path) -> None:
    folder, real = tmp_path / name, RECORDINGS / name
    if name == "idle":  # nothing but /health shows that the engine of an idle server is alive
        real = with_health(name, tmp_path / "real", 200)
        with_health(name, folder, 200)
    report = judged(with_lines(name, folder, 0.4, lines_of))
    assert told(report) == told(judged(real))
    if lines_of == "alone":
        note = next(note for note in coverage.notes(report) if "conflicts with its metrics" in note)
        assert "cuda_out_of_memory" in note
        assert "the same process goes on answering" in note


def test_death_in_the_log_of_an_idle_server_is_unknown_where_health_is_not_measured(tmp_path: Path) -> None:
    """Its page comes from the API server, which outlives its engine with VLLM_KEEP_ALIVE_ON_ENGINE_DEATH."""
    report = judged(with_lines("idle", tmp_path / "idle", 0.4, "alone"))
    assert (report.verdict, report.progress) == ("unknown", ())
    assert "the page of an idle server proves its API server alone" in report.not_judged[0].sentence
    assert any("nothing that is measured proves or refutes it" in note for note in coverage.notes(report))


def test_health_of_503_proves_the_death_that_the_log_of_an_idle_server_claims(tmp_path: Path) -> None:
    folder = with_lines("idle", with_health("idle", tmp_path / "idle", 503), 0.1, "death")
    report = judged(folder)
    assert [found.diagnosis.incident.id for found in report.present] == ["gpu_out_of_memory", "engine_dead"]
    assert "OutOfMemoryError" in report.present[0].quotes[0].text


@pytest.mark.parametrize(("share", "lines_of"), [(0.2, "alone"), (0.2, "access lines"), (1.0, "access lines")])
@pytest.mark.parametrize("name", ["engine_dead", "engine_device_fault"])
def test_a_real_death_among_forged_lines_keeps_its_cause(
    name: str, share: float, lines_of: str, tmp_path: Path
) -> None:
    """The recordings run idle for some seconds before the death, so a third of the way is well before it."""
    folder = with_lines(name, tmp_path / name, share, lines_of)
    real, found = judged(RECORDINGS / name), judged(folder)
    assert (found.verdict, [f.diagnosis.incident.id for f in found.present]) == (
        real.verdict,
        [f.diagnosis.incident.id for f in real.present],
    )
    assert [quote.text for quote in found.present[0].quotes] == [quote.text for quote in real.present[0].quotes]


def test_a_rotated_log_that_begins_with_forged_lines_configures_nothing(tmp_path: Path) -> None:
    folder = with_lines("healthy", tmp_path / "healthy", 0.4, "alone")
    log = folder / "server.log"
    text = log.read_text(encoding="utf-8")
    log.write_text(text[text.index("EngineCore encountered a fatal error") - 80 :].partition("\n")[2], encoding="utf-8")
    report = judged(folder)
    assert report.verdict == "healthy"
    assert "4242" not in str(told(report))
    assert all(server.version != "9.9.9" and server.model != "forged" for server in report.observed.servers)


@pytest.mark.parametrize(("age", "is_told"), [(200, True), (400, False)])
def test_a_claim_from_long_before_the_first_scrape_is_no_news(age: int, is_told: bool, tmp_path: Path) -> None:
    text = gzip.decompress((RECORDINGS / "healthy" / "metrics.prom.gz").read_bytes()).decode()
    at = float(re.findall(r"^# scrape ([\d.]+) ", text, re.MULTILINE)[0]) - age
    claim = f'diag_vllm_log_claim_timestamp_seconds{{event="engine_dead",text="x"}} {at}\n'
    (tmp_path / "metrics.prom").write_text(re.sub(r"(?m)^(# scrape .*\n)", rf"\1{claim}", text), encoding="utf-8")
    notes = coverage.notes(judged(tmp_path))
    assert any("conflicts with its metrics" in note for note in notes) == is_told
