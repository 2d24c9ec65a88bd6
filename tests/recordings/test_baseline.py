"""Normal values of a server are learnt while it is healthy, and reported beside a diagnosis only at the same load."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support import cli, rewriting
from support.paths import RECORDINGS, ROOT
from support.schemas import validator

from diag.commands import doctor, verify
from diag.commands.observe import ObserveOptions
from diag.core.errors import BadUsage
from diag.diagnosis.report import NormalReading, Report
from diag.normal.baseline import MOST_ROWS, Normal, ServerKind, merged, read
from diag.report import html, terminal
from diag.report import json as as_json
from diag.report.coverage import normal_sentence

SCHEMA = validator(ROOT / "diag/normal/diag.baseline.schema.json")
LATENCY = r"^(vllm:(?:inter_token_latency|time_to_first_token)_seconds_sum\S* )(\S+)$"


def slower(page: str) -> str:
    """The page of a server whose tokens all took 1.8 times as long."""
    return re.sub(LATENCY, lambda found: f"{found[1]}{1.8 * float(found[2])}", page, flags=re.MULTILINE)


def ill(page: str) -> str:
    """The page of a slower server whose KV cache is full."""
    full = rewriting.with_value(slower(page), "vllm:kv_cache_usage_perc{", "1.0")
    return rewriting.with_value(full, "vllm:num_requests_waiting{", "5")


def rewritten(folder: Path, change: Callable[[str], str], name: str = "healthy") -> str:
    return str(rewriting.write(folder, rewriting.changed(rewriting.scrapes(name), change)))


def saved(folder: Path, *recordings: str, include_unhealthy: bool = False) -> Path:
    file = folder / "normal.json"
    verify.save_baseline(ObserveOptions([str(RECORDINGS / name) for name in recordings]), file, include_unhealthy)
    return file


def notable(report: Report) -> dict[str, NormalReading]:
    return {reading.measure: reading for reading in report.normality.readings if reading.notable}


def test_slower_server_is_reported_as_a_multiple_of_normal_with_the_same_verdict(tmp_path: Path) -> None:
    file, slow = saved(tmp_path, "healthy"), rewritten(tmp_path / "slow", slower)
    report = doctor.run(ObserveOptions([slow]), file)
    found = notable(report)
    # of TTFT, whose windows differ by far more, five windows do not tell
    assert {name: round(reading.ratio or 0, 1) for name, reading in found.items()} == {"ITL (mean)": 1.8}
    sentence = r"ITL \(mean\) 37.4 ms: 1.79x this server's normal \(.*\) at 4.09 running requests.*, vLLM 0.32.0"
    assert re.fullmatch(sentence, normal_sentence(found["ITL (mean)"]))
    assert found["ITL (mean)"].against == "this server's normal"
    alone = doctor.run(ObserveOptions([slow]))
    assert (report.verdict, report.present, report.not_judged) == (
        alone.verdict,
        alone.present,
        alone.not_judged,
    )
    assert "Normal      ITL (mean) 37" in terminal.render(report)
    assert "unlike normal" in html.render(report)
    assert json.loads(as_json.render(report))["normal"]["baseline"] == str(file)


def test_unchanged_server_has_no_deviation_from_its_baseline(tmp_path: Path) -> None:
    report = doctor.run(ObserveOptions([str(RECORDINGS / "healthy")]), saved(tmp_path, "healthy"))
    assert (notable(report), len(report.normality.readings) > 3) == ({}, True)
    assert "as usual at this load" in " ".join(terminal.render(report).split())


def test_difference_below_the_least_notable_one_is_not_reported(tmp_path: Path) -> None:
    """0.75 ms are 1.8 times 0.42 ms, but no client notices the 0.33 ms between them."""

    def quick(page: str) -> str:
        return re.sub(LATENCY, lambda found: f"{found[1]}{0.02 * float(found[2])}", page, flags=re.MULTILINE)

    normal = tmp_path / "normal.json"
    verify.save_baseline(ObserveOptions([rewritten(tmp_path / "quick", quick)]), normal, include_unhealthy=False)
    slow = rewritten(tmp_path / "slow", lambda page: slower(quick(page)))
    report = doctor.run(ObserveOptions([slow]), normal)
    ratios = {reading.measure: round(reading.ratio or 0, 1) for reading in report.normality.readings}
    assert (ratios["ITL (mean)"], notable(report)) == (1.8, {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda page: re.sub(r"^(vllm:num_requests_running\S* )\S+$", r"\g<1>64", page, flags=re.MULTILINE), "64 - 64"),
        (lambda page: rewriting.of_model(page, "other"), "no server of the model other"),
    ],
    ids=["another load", "another model"],
)
def test_incomparable_server_is_not_compared_with_a_baseline(
    tmp_path: Path, change: Callable[[str], str], reason: str
) -> None:
    other = rewritten(tmp_path / "other", lambda page: slower(change(page)))
    report = doctor.run(ObserveOptions([other]), saved(tmp_path, "healthy"))
    assert "ITL (mean)" not in notable(report)
    assert reason in report.normality.reasons[0]


def test_server_with_an_incident_is_saved_only_with_include_unhealthy(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match=r"kv_eviction_cascade.*--include-unhealthy"):
        saved(tmp_path, "kv_cascade")
    assert not (tmp_path / "normal.json").exists()
    assert read(saved(tmp_path, "kv_cascade", include_unhealthy=True))


@pytest.mark.parametrize("option", ["--include-unhealthy", "--even-ill"])
def test_option_that_includes_unhealthy_servers_keeps_its_old_name(tmp_path: Path, option: str) -> None:
    file = tmp_path / "normal.json"
    done = cli.diag("baseline", "save", "tests/recordings/kv_cascade", option, "--file", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert read(file)


def test_window_saved_twice_counts_once_and_new_windows_are_added(tmp_path: Path) -> None:
    once = read(saved(tmp_path, "healthy"))
    assert read(saved(tmp_path, "healthy", "healthy")) == once
    both = read(saved(tmp_path, "healthy_vllm_0_20_2"))
    assert [normal.kind.version for normal in both] == ["0.32.0", "0.20.2"]
    SCHEMA.validate(json.loads((tmp_path / "normal.json").read_text(encoding="utf-8")))


def test_a_file_stays_small_and_keeps_every_load() -> None:
    rows = tuple({"at": float(at), "running": float(at % 40)} for at in range(5 * MOST_ROWS))
    kept = merged([Normal(ServerKind("m", "1", ""), rows)])[0].rows
    assert len(kept) == MOST_ROWS
    assert {row["running"] for row in kept} == {float(load) for load in range(40)}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"schema": "diag.baseline/2"}', 'it needs "schema": "diag.baseline/1"'),
        ('{"schema": "diag.baseline/1"}', "no valid baseline"),
        ('{"schema": "diag.baseline/1", "servers": [{"columns": ["at"]}]}', "no valid baseline"),
    ],
    ids=["cut", "deep", "newer", "empty", "half"],
)
def test_a_file_that_is_no_baseline_is_refused_in_one_sentence(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "normal.json").write_text(text)
    with pytest.raises(BadUsage) as refused:
        doctor.run(ObserveOptions([str(RECORDINGS / "healthy")]), tmp_path / "normal.json")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_slower_start_is_reported_by_phase(tmp_path: Path) -> None:
    file = saved(tmp_path, "healthy")
    known = json.loads(file.read_text(encoding="utf-8"))
    known["servers"][0]["startup_seconds"] = [{"compile": 9.0 + at, "load_weights": 2.0 + at} for at in range(3)]
    file.write_text(json.dumps(known), encoding="utf-8")
    found = notable(doctor.run(ObserveOptions([str(RECORDINGS / "healthy")]), file))
    assert {name: (reading.value, reading.normal) for name, reading in found.items()} == {
        "start-up phase compile": (38.0, 10.0)
    }


def test_two_baseline_files_are_compared_at_the_same_load(tmp_path: Path) -> None:
    before, after = tmp_path / "normal.json", tmp_path / "later.json"
    cli.diag("baseline", "save", "tests/recordings/healthy", "--file", str(before))
    cli.diag("baseline", "save", rewritten(tmp_path / "slow", slower), "--file", str(after))
    done = cli.diag("baseline", "compare", str(before), str(after))
    assert done.returncode == 1
    assert re.match(r"worse: ITL \(mean\) 37.4 ms: 1.79x this server's normal \(20.9 ms .*\)", done.stdout)
    assert "no change: TTFT (mean)" in done.stdout
    assert cli.diag("baseline", "compare", str(after), str(before)).stdout.startswith("better: ITL")
    same = cli.diag("baseline", "compare", str(before), str(before))
    assert (same.returncode, same.stdout.partition(":")[0]) == (0, "no change")
    alone = cli.diag("baseline", "compare", str(before))
    assert (alone.returncode, alone.stderr.count("\n")) == (64, 1)


def test_other_flags_of_the_baseline_are_named(tmp_path: Path) -> None:
    file = saved(tmp_path, "healthy")
    known = json.loads(file.read_text(encoding="utf-8"))
    known["servers"][0]["flags"]["block_size"] = 16.0
    file.write_text(json.dumps(known), encoding="utf-8")
    readings = doctor.run(ObserveOptions([str(RECORDINGS / "healthy")]), file).normality.readings
    assert {reading.against for reading in readings} == {"this server's normal (with another --block-size)"}


def test_each_release_of_an_upgraded_server_has_rows_of_its_own(tmp_path: Path) -> None:
    normals = read(saved(tmp_path, "version_upgraded"))
    assert [(normal.kind.version, len(normal.rows)) for normal in normals] == [("0.31.0", 15), ("0.32.0", 16)]


def test_diag_toml_names_the_file(tmp_path: Path) -> None:
    saved(tmp_path, "healthy")
    (tmp_path / "diag.toml").write_text('[baseline]\nfile = "normal.json"\n')
    options = ObserveOptions([str(RECORDINGS / "healthy")], contract=tmp_path / "diag.toml")
    assert doctor.run(options).normality.readings


def test_without_a_file_an_ill_server_is_compared_with_its_peers(tmp_path: Path) -> None:
    """Three healthy replicas, a slow one, and one that is slow and whose KV cache is full."""
    fleet = [list(rewriting.scrapes("healthy")) for _ in range(3)]
    fleet += [list(rewriting.changed(rewriting.scrapes("healthy"), change)) for change in (slower, ill)]
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "fleet", rewriting.side_by_side(*fleet)))]))
    said = report.normality.readings
    assert {dict(reading.subject)["instance"] for reading in said} == {"r4:8000"}
    assert [round(reading.ratio or 0, 1) for reading in said if reading.measure == "ITL (mean)"] == [1.8]
    assert "the median of 4 peers" in normal_sentence(said[0])


@pytest.mark.parametrize(("peers", "compared"), [(3, True), (2, False)])
def test_ill_server_is_compared_with_three_peers_or_more(tmp_path: Path, peers: int, compared: bool) -> None:
    fleet = [list(rewriting.scrapes("healthy")) for _ in range(peers)]
    fleet.append(list(rewriting.changed(rewriting.scrapes("healthy"), ill)))
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "fleet", rewriting.side_by_side(*fleet)))]))
    assert bool(report.normality.readings) == compared
