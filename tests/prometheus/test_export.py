"""The signals of a span as CSV: what the doctor judges by, for a person to analyse; and what is not loaded for less."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from support.cli import DIAG, diag
from support.paths import ROOT
from support.prometheus_server import PLACES, Server, program, serving
from support.timelines import CALM, TIMES, blocks, timeline

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.report import Report
from diag.report.dataframe import COLUMNS
from diag.sources.prometheus.scope import Scope, TimeSpan

RECORDING = "tests/recordings/kv_cascade"
END = 1_790_000_000.5
KEY = ["time", "instance", "engine", "gpu", "signal", "window"]


def exported(folder: Path, *words: str) -> pd.DataFrame:
    """Return the file that `diag export` wrote, read back."""
    file = folder / "out.csv"
    done = diag("export", *words, "--csv", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    frame = read(file)
    assert re.fullmatch(rf"{re.escape(str(file))}: {len(frame):,} values at \d+ instants\n", done.stdout)
    return frame


def read(file: Path) -> pd.DataFrame:
    return pd.read_csv(file, dtype={"engine": str, "gpu": str}, keep_default_na=False, na_values={"value": []})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return exported(tmp_path_factory.mktemp("recorded"), RECORDING)


@cache
def judged_recording() -> Report:
    return doctor.run(ObserveOptions([RECORDING]))


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Server]:
    """A cascade with the GPUs and processes of its host beside it."""
    with serving(program(PLACES[1]), blocks(timeline("kv_cascade", *CALM, before=CALM), END - float(TIMES[-1]))) as it:
        yield it


@pytest.fixture(scope="module")
def stored(prometheus: Server, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    words = ("--prometheus", prometheus.url, "--at", str(END), "--window", "20m")
    return exported(tmp_path_factory.mktemp("stored"), *words)


@pytest.fixture(params=["recording", pytest.param("prometheus", marks=pytest.mark.prometheus)])
def both(request: pytest.FixtureRequest) -> tuple[pd.DataFrame, Report]:
    """Return the export of a source and the doctor's report on it."""
    if request.param == "recording":
        return request.getfixturevalue("recorded"), judged_recording()
    url = request.getfixturevalue("prometheus").url
    scope = Scope(TimeSpan(at=str(END), window="20m"))
    return request.getfixturevalue("stored"), doctor.run(ObserveOptions([], prometheus=url, scope=scope))


def told(frame: pd.DataFrame, subject: Sequence[tuple[str, str]], reading: Reading) -> list[dict[float, float]]:
    """The values of one signal for one subject, by unix seconds: those over one window, those over another."""
    labels = {"instance": "", "engine": "", "gpu": "", **dict(subject), "signal": reading.condition.signal.name}
    same = frame[(frame[[*labels]] == [*labels.values()]).all(axis=1)]
    seconds = pd.to_datetime(same["time"], utc=True).map(pd.Timestamp.timestamp)
    return [dict(zip(seconds[each.index], each, strict=True)) for _, each in same["value"].groupby(same["window"])]


def test_the_columns_are_named(both: tuple[pd.DataFrame, Report]) -> None:
    assert tuple(both[0].columns) == COLUMNS


def test_times_are_utc_and_ascend(both: tuple[pd.DataFrame, Report]) -> None:
    times = both[0]["time"]
    assert times.str.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z").all()
    assert times.is_monotonic_increasing
    assert pd.Timestamp(times.iloc[-1]).timestamp() == both[1].observed.end


def test_no_value_is_exported_twice(both: tuple[pd.DataFrame, Report]) -> None:
    assert not both[0].duplicated(KEY).any()


def test_export_has_exactly_the_values_of_the_doctor(both: tuple[pd.DataFrame, Report]) -> None:
    frame, report = both
    known = set()
    for one in (each.diagnosis for each in report.findings):
        for reading in (*one.symptoms, *one.supports, *one.escalation):
            history = zip(one.instants, reading.history, strict=True)
            expected = {at: value for at, value in history if value is not None}
            assert expected in (told(frame, one.subject, reading) or [{}]), reading.condition.signal.name
            known |= {reading.condition.signal.name} if expected else set()
    incidents = [each.diagnosis.incident for each in report.findings]
    sudden = {incident.sudden.signal.name for incident in incidents if incident.sudden}  # another case of its incident
    assert known | sudden == set(frame["signal"]) | sudden


def test_last_exported_value_is_the_printed_value(recorded: pd.DataFrame) -> None:
    """A report tells the instant at which the incident held last: here the last of all."""
    cascade = judged_recording().present[0].diagnosis
    assert cascade.until == cascade.instants[-1]
    for reading in cascade.symptoms:
        assert reading.value in [each[cascade.until] for each in told(recorded, cascade.subject, reading)]


def test_a_hostile_label_is_one_cell_that_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    evil = 'a,"b"\n;=1+1\t\x1b[2J'
    label = evil.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    page = f'vllm:num_requests_running{{engine="{label}",model_name="m"}} 1\n'
    (tmp_path / "metrics.prom").write_text("".join(f"# scrape {1795227337 + at} h:1\n{page}" for at in range(40)))
    assert set(exported(tmp_path, str(tmp_path))["engine"]) == {r'a,"b"\n;=1+1\t\x1b[2J', ""}


def test_export_without_a_file_writes_only_to_standard_output(tmp_path: Path, recorded: pd.DataFrame) -> None:
    done = diag("export", RECORDING)
    (tmp_path / "out.csv").write_text(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    pd.testing.assert_frame_equal(read(tmp_path / "out.csv"), recorded)


@pytest.mark.parametrize(
    ("file", "why"),
    [("nowhere/out.csv", "No such file or directory"), (".", "Is a directory"), ("/dev/full", "No space left")],
)
def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path, file: str, why: str) -> None:
    path = tmp_path / file
    done = diag("export", RECORDING, "--csv", str(path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (64, "", 1)
    assert done.stderr.startswith(f"diag: {path} cannot be written: {why}")


def test_closed_pipe_is_no_error() -> None:
    command = f"{DIAG} export {RECORDING} | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout, done.stderr) == (",".join(COLUMNS) + "\n", "")


def test_a_label_of_a_users_own_incident_is_a_column_too(tmp_path: Path) -> None:
    (tmp_path / "many_waits.py").write_text(
        "from diag.incident import Incident, Signal, judged\n"
        "metric = 'vllm:num_requests_waiting_by_reason'\n"
        "waits = Signal('waits', f'sum by ($by) (last_over_time({metric}[$window]))', '{value}', 'requests')\n"
        "incident = Incident(id='many_waits', title='Many wait', severity='warning', per=('instance', 'reason'),\n"
        "    cause='', impact='they wait', symptoms=(waits.above(5, judged('a test')),), looks_like=(), fixes=())\n",
        encoding="utf-8",
    )
    frame = exported(tmp_path, RECORDING, "--incidents", str(tmp_path))
    assert tuple(frame.columns) == (*COLUMNS[:4], "reason", *COLUMNS[4:])
    assert set(frame["reason"][frame["signal"] == "waits"]) == {"capacity", "deferred"}


# -- what is loaded ---------------------------------------------------------------------------------------------------

HEAVY = ("pandas", "prometheus_api_client", "requests", "matplotlib", "grafanalib", "pynvml")
LOADED = (
    "import sys\n"
    "from diag.cli.app import main\n"
    "try:\n"
    "    main()\n"
    "finally:\n"
    "    print(*sorted({each.split('.')[0] for each in sys.modules}), file=sys.stderr)\n"
)


def loaded(*words: str) -> set[str]:
    """Return the heavy libraries that a command loads."""
    done = subprocess.run([sys.executable, "-c", LOADED, *words], capture_output=True, text=True, cwd=ROOT, check=False)
    return set(done.stderr.splitlines()[-1].split()) & set(HEAVY)


@pytest.mark.parametrize("words", [("--help",), ("doctor", "--help"), ("incidents",), ("doctor", RECORDING)])
def test_command_without_prometheus_or_export_loads_no_library_for_them(words: tuple[str, ...]) -> None:
    assert loaded(*words) == set()


@pytest.mark.prometheus
def test_prometheus_query_loads_no_data_frame_library(prometheus: Server) -> None:
    words = ("doctor", "--prometheus", prometheus.url, "--at", str(END), "--json")
    assert loaded(*words) == {"prometheus_api_client", "requests"}
