"""Reading recordings: what can be judged is judged, what cannot is refused in one sentence."""

import gzip
import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from support.paths import ALL_RECORDINGS, RECORDINGS
from support.sampling import some

from diag.core.errors import BadRecording
from diag.promql import evaluate
from diag.sources.observation import Observation
from diag.sources.recording.reader import read

PAGE = 'vllm:num_requests_running{engine="0",model_name="tiny"} 3\n'


def scrapes(*times: float, instance: str = "h:1", page: str = PAGE) -> str:
    return "".join(f"# scrape {at} {instance}\n{page}" for at in times)


def written(folder: Path, pages: str | bytes, about: str | None = None) -> Path:
    raw = pages.encode() if isinstance(pages, str) else pages
    (folder / "metrics.prom.gz").write_bytes(gzip.compress(raw))
    if about is not None:
        (folder / "recording.toml").write_text(about, encoding="utf-8")
    return folder


def running(observed: Observation) -> list[float]:
    vector = evaluate("vllm:num_requests_running", observed.samples, observed.instants)
    return vector.values[vector.present].tolist()


def refusal(path: Path) -> str:
    with pytest.raises(BadRecording) as error:
        read(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_real_recording_is_read() -> None:
    observed = read(RECORDINGS / "engine_dead")
    assert (observed.scrapes, observed.failed_scrapes, observed.interval) == (33, 20, 2.0)
    assert observed.versions == {"127.0.0.1:8201": "0.32.0"}
    assert observed.models == {"127.0.0.1:8201": "tiny"}
    assert observed.launch["127.0.0.1:8201"].endswith("--max-num-seqs 32 --enforce-eager")


LENGTHS = {1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072}
"""Of the contexts that the recorded servers were started with."""


@pytest.mark.slow
@pytest.mark.parametrize("folder", some(ALL_RECORDINGS, 24), ids=lambda folder: folder.name)
def test_every_recording_publishes_its_configuration(folder: Path) -> None:
    observed = read(folder)
    query = 'max(last_over_time(diag_vllm_config{flag="max_model_len"}[1h]))'
    assert evaluate(query, observed.samples, observed.instants[-1:]).values[0, 0] in LENGTHS


@pytest.mark.parametrize("name", ["kv_cascade", "healthy", "tp2_long_stall"])
def test_page_and_launch_command_of_a_real_server_agree(name: str) -> None:
    assert read(RECORDINGS / name).notes == ()


def test_reading_does_not_load_what_only_live_servers_need() -> None:
    code = f"""
import sys
from pathlib import Path
from diag.sources.recording.reader import read
read(Path({str(RECORDINGS / "idle")!r}))
print([each for each in ("http.client", "asyncio", "ssl", "prometheus_client", "rich") if each in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_file_itself_may_be_named(tmp_path: Path) -> None:
    file = written(tmp_path, scrapes(1, 3), 'vllm = "0.9.1"\n') / "metrics.prom.gz"
    assert read(file).versions == {"h:1": "0.9.1"}


def test_log_completes_the_page_of_an_exporter_that_knows_less(tmp_path: Path) -> None:
    fatal = "(EngineCore pid=5) ERROR 11-27 03:34:29 [core.py:710] EngineCore encountered a fatal error.\n"
    (tmp_path / "server.log").write_text(fatal)
    page = PAGE + 'diag_vllm_log_events_total{event="engine_dead"} 0\n'
    observed = read(written(tmp_path, scrapes(1795750464, 1795750469, 1795750474, page=page)))
    events = 'diag_vllm_log_events_total{event=~"engine_dead|grammar_failed"}'
    assert evaluate(events, observed.samples, observed.instants).values[:, -1].tolist() == [0, 0]


def test_pages_need_not_be_compressed(tmp_path: Path) -> None:
    (tmp_path / "metrics.prom").write_text(scrapes(1, 3))
    assert read(tmp_path).scrapes == 2


def test_failed_scrapes_are_read(tmp_path: Path) -> None:
    text = scrapes(1) + "# scrape-failed 3 h:1 connection refused\n# scrape-failed 5 h:1\n" + scrapes(7)
    observed = read(written(tmp_path, text))
    assert (observed.scrapes, observed.failed_scrapes) == (4, 2)
    assert observed.notes == (
        "2 of 4 scrapes of h:1 failed: connection refused (1), no reason was recorded (1) "
        "(from 00:00:03 UTC to 00:00:05 UTC)",
    )


def test_a_recording_of_failures_alone_is_judged(tmp_path: Path) -> None:
    observed = read(written(tmp_path, "# scrape-failed 3 h:1 refused\n# scrape-failed 5 h:1 refused\n"))
    assert evaluate("up", observed.samples, observed.instants).values.tolist() == [[0, 0]]


def test_text_below_a_failed_scrape_is_ignored(tmp_path: Path) -> None:
    observed = read(written(tmp_path, scrapes(1) + "# scrape-failed 3 h:1 refused\n<html>\n"))
    assert (observed.scrapes, observed.failed_scrapes) == (2, 1)


def test_invalid_page_in_a_recording_is_a_failed_scrape(tmp_path: Path) -> None:
    observed = read(written(tmp_path, scrapes(1) + "# scrape 3 h:1\n<html>\n"))
    assert observed.failed_scrapes == 1


def test_two_servers_in_one_recording_are_two_targets(tmp_path: Path) -> None:
    text = "".join(scrapes(at) + scrapes(at + 0.1, instance="h:2") for at in (1, 3, 5))
    observed = read(written(tmp_path, text))
    assert (observed.instances, observed.interval, len(observed.instants)) == (("h:1", "h:2"), 2.0, 3)


def test_descriptions_of_recorded_servers_are_kept_apart(tmp_path: Path) -> None:
    about = """
[config]
max_num_seqs = 64
[config."h:2"]
version = "0.33.0"
launch = "vllm serve n"
max_model_len = 4096
server_info = { max_num_seqs = 32 }
"""
    text = scrapes(1, page="x 1\n") + scrapes(1, instance="h:2", page="x 1\n")
    observed = read(written(tmp_path, text, about))
    vector = evaluate("diag_vllm_config", observed.samples, observed.instants[-1:])
    flags = {(each["instance"], each["flag"]): row[0] for each, row in zip(vector.labels, vector.values, strict=True)}
    assert flags == {("h:1", "max_num_seqs"): 64, ("h:2", "max_num_seqs"): 32, ("h:2", "max_model_len"): 4096}
    assert (observed.versions, observed.launch) == ({"h:2": "0.33.0"}, {"h:2": "vllm serve n"})


def test_given_launch_command_overrides_the_recorded_one(tmp_path: Path) -> None:
    folder = written(tmp_path, scrapes(1), 'launch = "vllm serve old"\n')
    assert read(folder, launch="vllm serve new").launch == {"h:1": "vllm serve new"}


def test_remarks_of_the_recording_come_first(tmp_path: Path) -> None:
    assert read(written(tmp_path, scrapes(1), 'remarks = ["interrupted"]\n')).notes == ("interrupted",)


def test_one_scrape_takes_its_interval_from_the_toml(tmp_path: Path) -> None:
    assert read(written(tmp_path, scrapes(1), "scrape_interval_seconds = 2\n")).interval == 2.0


def test_unsorted_scrapes_are_sorted(tmp_path: Path) -> None:
    text = "".join(scrapes(at, page=PAGE.replace("3", str(at))) for at in (5, 1, 3))
    observed = read(written(tmp_path, text))
    assert running(observed) == [1, 3, 5]
    assert "1 scrape of h:1 out of order: sorted by time" in observed.notes


def test_truncated_gzip_is_judged_up_to_the_cut(tmp_path: Path) -> None:
    noise = random.Random(1)
    pages = [PAGE + "".join(f"x{i} {noise.random()}\n" for i in range(2000)) for _ in range(4)]
    written(tmp_path, "".join(scrapes(2 * i, page=page) for i, page in enumerate(pages)))
    file = tmp_path / "metrics.prom.gz"
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 6 // 10])
    observed = read(tmp_path)
    assert observed.scrapes == 2  # the third one is torn: what is missing there was never missing
    assert observed.notes == ("the recording ends in the middle (a truncated gzip file): the readable part was used",)


def test_damage_in_the_middle_is_noted(tmp_path: Path) -> None:
    noise = random.Random(1)
    pages = [PAGE + "".join(f"x{i} {noise.random()}\n" for i in range(2000)) for _ in range(4)]
    written(tmp_path, "".join(scrapes(2 * i, page=page) for i, page in enumerate(pages)))
    file = tmp_path / "metrics.prom.gz"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 64] = b"\xff" * 64
    file.write_bytes(raw)
    observed = read(tmp_path)
    assert 0 < observed.scrapes < 5
    assert "the recording is damaged" in observed.notes[0]


def test_recordings_may_be_joined(tmp_path: Path) -> None:
    parts = [gzip.compress(scrapes(at).encode()) for at in (1, 3)]
    (tmp_path / "metrics.prom.gz").write_bytes(b"".join(parts))
    assert read(tmp_path).scrapes == 2


@pytest.mark.parametrize("time", ["nan", "inf", "-1", "1e300", "soon"])
def test_scrape_without_a_time_is_left_out_and_noted(tmp_path: Path, time: str) -> None:
    observed = read(written(tmp_path, scrapes(1) + f"# scrape {time} h:1\n{PAGE}" + scrapes(3)))
    assert observed.scrapes == 2
    assert observed.notes == (f"1 scrape skipped (without a valid time): # scrape {time} h:1",)


def test_recording_from_the_future_is_judged_and_noted(tmp_path: Path) -> None:
    observed = read(written(tmp_path, scrapes(4_102_444_800, 4_102_444_802)))
    assert observed.scrapes == 2
    assert observed.notes == ("the last scrape is dated in the future (2100-01-01 00:00:02 UTC): a clock was wrong",)


def test_a_page_that_is_too_big_is_a_failed_scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diag.sources.recording.reader.MOST_BYTES", 2**20)
    text = scrapes(1) + scrapes(3, page=PAGE + "# x\n" * 2**20) + scrapes(5)
    observed = read(written(tmp_path, text))
    assert (observed.scrapes, observed.failed_scrapes) == (3, 1)
    assert observed.notes == ("1 of 3 scrapes of h:1 failed: sent more than 1 MiB (at 00:00:03 UTC)",)


def test_a_page_that_is_too_big_is_never_held_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diag.sources.recording.reader.MOST_BYTES", 2**20)
    written(tmp_path, (scrapes(1) + "# scrape 3 h:1\n").encode() + b"\0" * 32 * 2**20)
    tracemalloc.start()
    read(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_surplus_scrapes_are_cut_off_and_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diag.sources.recording.reader.MOST_SCRAPES", 2)
    observed = read(written(tmp_path, scrapes(1, 3, 5)))
    assert (observed.scrapes, observed.notes) == (
        2,
        ("the recording goes beyond 2 scrapes: its first 2 scrapes were used",),
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (gzip.compress(b"", mtime=0), "has no line '# scrape <unix seconds> <instance>': it was not written by"),
        (b"vllm:num_requests_running 3\n", "has no line '# scrape"),
        (bytes(range(256)) * 1000, "has no line '# scrape"),
        (b"\x1f\x8b" + bytes(range(256)), "is damaged"),
        (gzip.compress(b"# scrape 1 h:1\nx 1\n", mtime=0)[:12], "ends in the middle (a truncated gzip file)"),
        (b"# scrape nan h:1\nx 1\n", "has no scrape with a time and an instance: # scrape nan h:1"),
        (b"# scrape \x1b[2J\nx 1\n", "has no scrape with a time and an instance: # scrape \\x1b[2J"),
    ],
)
def test_empty_recording_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "metrics.prom.gz").write_bytes(content)
    assert reason in refusal(tmp_path)


def test_a_folder_without_pages_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert refusal(tmp_path) == (
        f"{tmp_path} holds neither a recording (metrics.prom.gz) nor logs (*.log, *.log.gz, *.txt, *.out, *.err): "
        "name the log itself, or a folder that `diag record` wrote"
    )


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "x") == f"there is no recording at {tmp_path / 'x'}"


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ("verdict = ", "recording.toml is not valid TOML: Invalid value"),
        ("vllm = 32", "recording.toml: 32 should be a str"),
        ("config = []", "recording.toml: [] should be a dict"),
        ('[config."h:1"]\nmodels = "tiny"', "recording.toml: 'tiny' should be a list"),
        ("remarks = [1]", "recording.toml: 1 should be a str"),
        ('scrape_interval_seconds = "2s"', "recording.toml: '2s' should be a float"),
    ],
)
def test_invalid_recording_toml_is_refused(tmp_path: Path, about: str, reason: str) -> None:
    assert reason in refusal(written(tmp_path, scrapes(1), about))


@pytest.mark.slow
def test_reading_takes_time_linear_in_targets(tmp_path: Path) -> None:
    def seconds(targets: int) -> float:
        folder = tmp_path / str(targets)
        folder.mkdir()
        body = "".join(f'x{{a="{i}"}} 1\n' for i in range(50))
        written(folder, "".join(scrapes(at, instance=f"h:{n}", page=body) for at in range(5) for n in range(targets)))
        start = time.process_time()
        read(folder)
        return time.process_time() - start

    assert min(seconds(n) for n in (201, 202, 203)) < 12 * max(0.01, min(seconds(n) for n in (40, 41, 42)))


def test_the_same_recording_gives_the_same_samples(tmp_path: Path) -> None:
    one, other = (read(RECORDINGS / "kv_undersized") for _ in range(2))
    query = '{__name__=~".+"}'
    left, right = (evaluate(query, each.samples, each.instants) for each in (one, other))
    assert left.labels == right.labels
    assert np.array_equal(left.values, right.values, equal_nan=True)


FIELDS = (
    *("remarks", "scrape_interval_seconds", "log_utc_offset", "vllm", "launch", "config", "config.max_num_seqs"),
    *(f'config."h:1"{key}' for key in ("", ".version", ".models", ".max_model_len", ".launch", ".process")),
    *('config."h:1".server_info', 'config."h:1".server_info.max_num_seqs'),
)
VALUES = (
    *("1", "-1", "1.5", "nan", "-inf", "true", '"x"', '""', "[]", "[1]", "[[1]]", "[{a=1}]", "[nan]", "{}", "{a=1}"),
    *("2026-01-01", "2026-01-01T00:00:00Z", "12:00:00", "[12:00:00]", "9223372036854775807", "1e308", '"+99:99"'),
)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_any_type_is_read_or_refused_in_a_sentence(field: str, tmp_path: Path) -> None:
    for value in VALUES:
        folder = written(tmp_path, scrapes(1, 3), f"{field} = {value}\n")
        try:
            seen = read(folder)
        except BadRecording as error:
            assert "recording.toml: " in str(error), value
            continue
        assert all(isinstance(note, str) for note in seen.notes), value
        assert all(isinstance(model, str) for model in seen.models.values()), value
