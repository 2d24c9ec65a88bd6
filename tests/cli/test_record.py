"""Recording live servers: what is written is judged as the live watch was, and holds no secrets."""

import gzip
import random
import re
import resource
import signal
import subprocess
import time
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bad_servers import PAGE, Reply, Request, Server, closed_port, cut_off, on_metrics, pages, serving, talking
from support.cli import DIAG, diag
from support.sampling import some

from diag.commands.doctor import run as doctor
from diag.commands.observe import ObserveOptions, record_servers
from diag.core.errors import BadRecording, BadUsage, Unreachable
from diag.exporter.page import host_collectors
from diag.exposition.scrapes import Target
from diag.http.address import Credentials
from diag.http.vllm_server import VllmServer
from diag.promql import evaluate
from diag.sources.live.scrape import ScrapePlan, ScrapeProgress
from diag.sources.live.server import JoinedPages
from diag.sources.observation import Observation, Origin, observation
from diag.sources.recording.reader import PAGES, read
from diag.sources.recording.writer import Recorder, record


def keep(server: Server | str, folder: Path, **plan: Any) -> Observation:
    """A recording of some three scrapes; a busy machine may leave one out."""
    target = server if isinstance(server, str) else server.url
    return record([target], folder, ScrapePlan(**{"every": 0.2, "duration": 0.4, "credentials": Credentials(), **plan}))


def everything(observed: Observation) -> list[tuple[dict[str, str], list[float]]]:
    vector = evaluate('{__name__=~".+"}', observed.samples, observed.instants)
    rows = np.where(vector.present, np.nan_to_num(vector.values, nan=-1.0), -2.0).tolist()
    return list(zip(vector.labels, rows, strict=True))


def same(live: Observation, recorded: Observation) -> bool:
    names = ["interval", "scrapes", "failed_scrapes", "notes", "instances", "versions", "models", "launch"]
    facts = [(getattr(live, name), getattr(recorded, name)) for name in names]
    assert all(left == right for left, right in facts), facts
    assert live.instants.tolist() == recorded.instants.tolist()
    assert everything(live) == everything(recorded)
    return True


def text(folder: Path) -> str:
    return gzip.decompress((folder / "metrics.prom.gz").read_bytes()).decode()


def answers(request: Request) -> Reply:
    bodies = {
        "/version": b'{"version": "0.32.0"}',
        "/v1/models": b'{"data": [{"id": "tiny", "max_model_len": 2048}]}',
        "/server_info?config_format=json": b'{"vllm_config": {"scheduler_config": {"max_num_seqs": 64}},'
        b' "vllm_env": {"VLLM_API_KEY": "secret"}}',
    }
    return Reply(bodies.get(request.path, PAGE))


def test_a_recording_is_judged_as_the_live_watch_was(tmp_path: Path) -> None:
    with serving(answers) as server:
        live = keep(server, tmp_path / "r", launch="vllm serve m --max-num-seqs 65")
    assert same(live, read(tmp_path / "r"))
    assert live.notes != ()


@pytest.mark.parametrize(
    "second",
    [
        Reply(b"", 500),
        Reply(b"<html>\n"),
        Reply(b"nonsense!\n"),
        Reply(b""),
        Reply(PAGE + b"x 1\n# scrape 1 other:1\ny 2\nx 3\nbad line!\n"),
        Reply(PAGE + b"# scrape-failed 1 other:1 x\nz NaN\n"),
        Reply(PAGE.replace(b'"tiny"', b'"\x1b[31m\\n\xff"')),
        Reply(PAGE + b"x 1 1795227337480\n"),
        Reply(b"\n\n" + PAGE + b"bad line!\n"),
    ],
)
def test_flaws_are_recorded_as_they_were_seen(tmp_path: Path, second: Reply) -> None:
    with serving(on_metrics(Reply(), second)) as server:
        live = keep(server, tmp_path / "r")
    assert same(live, read(tmp_path / "r"))
    assert live.instances == (server.instance,)


def test_a_page_that_was_cut_off_is_recorded_as_such(tmp_path: Path) -> None:
    with talking(cut_off) as server:
        live = keep(server, tmp_path / "r")
    assert same(live, read(tmp_path / "r"))
    assert "ended in the middle of a line" in live.notes[0]


def _with_its_host(server: VllmServer) -> JoinedPages:
    return JoinedPages(server, host_collectors(server.address, "", None))


def test_samples_of_the_host_are_recorded_after_the_server_is_gone(tmp_path: Path) -> None:
    with serving(on_metrics(Reply(), Reply(b"", 500))) as server:
        live = keep(server, tmp_path / "r", beside=_with_its_host)
    assert same(live, read(tmp_path / "r"))
    assert "\ndiag_vllm_up 0.0\n" in text(tmp_path / "r").partition("# scrape-failed")[2]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        pytest.param(PAGE, "0 failed;", id="vLLM's page"),
        pytest.param(b"diag_vllm_up 0\n", "0 failed, 1 without vLLM's metrics;", id="an exporter's"),
    ],
)
def test_pages_without_metrics_of_vllm_are_counted(tmp_path: Path, page: bytes, said: str) -> None:
    with serving(pages(page)) as server:
        assert f"1 scrape, {said}" in record_servers(ObserveOptions([server.url], duration=0.0), tmp_path / "r")


def test_the_probe_is_recorded(tmp_path: Path) -> None:
    with serving(answers) as server:
        live = keep(server, tmp_path / "r", probe=5.0)
    assert same(live, read(tmp_path / "r"))
    assert "\ndiag_probe_success 1\n" in text(tmp_path / "r")


def test_secrets_are_not_recorded(tmp_path: Path) -> None:
    launch = "HF_TOKEN=secret vllm serve /home/alice/m --api-key secret --max-num-seqs 64"
    with serving(answers) as server:
        access = Credentials(headers={"Authorization": "Bearer secret"})
        keep(
            f"http://me:secret@127.0.0.1:{server.port}/?token=secret", tmp_path / "r", credentials=access, launch=launch
        )
    everything_written = text(tmp_path / "r") + (tmp_path / "r" / "recording.toml").read_text()
    assert "secret" not in everything_written
    assert "alice" not in everything_written
    assert "--max-num-seqs 64" in everything_written


def test_names_of_home_folders_are_not_recorded(tmp_path: Path) -> None:
    with serving(pages(PAGE.replace(b'"tiny"', b'"/home/alice/models/m"'))) as server:
        live = keep(server, tmp_path / "r")
    assert 'model_name="~/models/m"' in text(tmp_path / "r")
    assert live.models == {server.instance: "~/models/m"}
    assert same(live, read(tmp_path / "r"))


LINES = [b"x 1", b'x{a="b"} 2', b"", b"# TYPE", b"# scrape 5 h:2", b"# scrape-failed 5 h:2 x", b"no!", b"\r", b"# EOF"]
ENDS = st.sampled_from([b"", b"\n"])
BODIES = st.builds(lambda lines, end: b"\n".join(lines) + end, st.lists(st.sampled_from(LINES), max_size=5), ENDS)


@given(st.lists(BODIES | st.binary(max_size=20), min_size=1, max_size=3))
def test_any_pages_are_read_as_they_were_written(bodies: list[bytes]) -> None:
    with TemporaryDirectory() as folder:
        target = Target("h:1")
        with Recorder(Path(folder)) as recorder:
            for at, body in enumerate(bodies):
                target.add(1000 * at, recorder.page(1000 * at, "h:1", body))
        recorded = read(Path(folder))
    assert same(observation(Origin("scrape", "h:1"), [target], {}), recorded)


def test_recording_toml_describes_the_recording(tmp_path: Path) -> None:
    with serving(answers) as server:
        keep(server, tmp_path / "r", launch='vllm serve "m" \\\n --max-num-seqs 64')
    about = tomllib.loads((tmp_path / "r" / "recording.toml").read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", about.pop("date"))
    assert about.pop("span_seconds") > 0
    assert about == {
        "measured": True,
        "diag": about["diag"],
        "scrape_interval_seconds": 0.2,
        "remarks": [],
        "config": {
            server.instance: {
                "version": "0.32.0",
                "models": ["tiny"],
                "max_model_len": 2048.0,
                "launch": "vllm serve m --max-num-seqs 64",
                "server_info": {"max_num_seqs": 64.0},
            }
        },
    }


def test_odd_names_survive_the_toml(tmp_path: Path) -> None:
    def answer(request: Request) -> Reply:
        return (
            Reply(b'{"data": [{"id": "a\\"\\u001b\\n\\u007f\\ud83d\\ude00\\ud800"}]}')
            if "v1" in request.path
            else Reply()
        )

    with serving(answer) as server:
        keep(server, tmp_path / "r")
    about = tomllib.loads((tmp_path / "r" / "recording.toml").read_text())
    assert about["config"][server.instance]["models"] == ['a"\x1b\n\x7f😀?']


@pytest.mark.parametrize("name", ["recording.toml", "else"])
def test_nonempty_folder_is_not_changed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with serving(answers) as server, pytest.raises(BadUsage, match="already exists"):
        keep(server, tmp_path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "mine")]
    assert server.requests == []


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    with serving(answers) as server:
        live = keep(server, tmp_path)
    assert read(tmp_path).scrapes == live.scrapes


def test_unreachable_server_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(Unreachable):
        keep(f"127.0.0.1:{closed_port()}", tmp_path / "a" / "r")
    assert not (tmp_path / "a" / "r").exists()


def test_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRecording, match=r"the recording cannot be written to .*/file/r: Not a directory"):
        keep("127.0.0.1:1", tmp_path / "file" / "r")


def test_full_disk_is_reported_and_the_recorded_part_is_kept(tmp_path: Path) -> None:
    page = PAGE + b"".join(b"x%d %d\n" % (i, i * 7919 % 10007) for i in range(20_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with (
            serving(pages(page)) as server,
            pytest.raises(BadRecording, match=r"cannot be written to .*: File too large"),
        ):
            keep(server, tmp_path / "r", duration=5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, previous)
    assert read(tmp_path / "r").scrapes > 1


def test_an_interrupted_recording_can_be_judged(tmp_path: Path) -> None:
    def stop(progress: ScrapeProgress) -> None:
        if progress.scrapes == 2:
            signal.raise_signal(signal.SIGINT)

    with serving(answers) as server:
        live = keep(server, tmp_path / "r", duration=60.0, on_progress=stop)
    assert same(live, read(tmp_path / "r"))
    assert live.notes[0] == "interrupted: only the scrapes until then were used"


@pytest.mark.slow
@pytest.mark.parametrize("seed", some(range(6), 3))
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_recording_that_is_stopped_at_any_moment_can_be_diagnosed(
    tmp_path: Path, how: signal.Signals, seed: int
) -> None:
    """Ctrl-C comes twice or three times within 20 ms each, as an impatient user presses it."""
    chance = random.Random(seed)
    most, folder = chance.randint(2, 6), tmp_path / "r"
    with serving(answers) as server:
        command = [DIAG, "record", server.url, str(folder), "--every", "0.1", "--for", "60"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            while len(server.asked("/metrics")) < most and process.poll() is None:
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.1))
            for _ in range(chance.choice([2, 3])):
                process.send_signal(how)
                time.sleep(chance.uniform(0, 0.02))
            assert process.communicate(timeout=60)[1] == ""
        asked = len(server.asked("/metrics"))
    assert process.returncode in {0, 130, -how}
    report = doctor(ObserveOptions([str(folder)]))
    assert asked - 1 <= report.observed.scrapes <= asked
    assert tomllib.loads((folder / "recording.toml").read_text())["scrape_interval_seconds"] == 0.1
    assert sorted(file.name for file in folder.iterdir()) == ["metrics.prom.gz", "recording.toml"]


def test_truncated_recording_yields_exactly_its_complete_scrapes(tmp_path: Path) -> None:
    page, sizes, file = (
        PAGE + b"".join(b"x%d %d\n" % (i, i * 7919 % 10007) for i in range(300)),
        [],
        tmp_path / PAGES[0],
    )
    with Recorder(tmp_path) as recorder:
        for at in range(1, 5):
            recorder.page(1000 * at, "h:1", page.replace(b" 1", b" %d" % at))
            sizes.append(file.stat().st_size)
    whole = file.read_bytes()
    for cut in random.Random(1).sample(range(sizes[0], len(whole)), 60):
        file.write_bytes(whole[:cut])
        assert read(tmp_path).scrapes == sum(size <= cut for size in sizes), cut


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, Unreachable, BadRecording])
def test_recorded_scrapes_survive_any_end(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), Recorder(tmp_path / "r") as recorder:
        recorder.page(1000, "h:1", PAGE)
        raise error
    assert read(tmp_path / "r").scrapes == 1


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with serving(answers) as server, Recorder(tmp_path / "r") as recorder:
        recorder.page(1000, "h:1", PAGE)
        done = diag("record", server.url, str(tmp_path / "r"))
        assert (done.returncode, done.stderr.count("\n")) == (64, 1)
        assert f"another diag is writing to {tmp_path / 'r'}" in done.stderr
    assert read(tmp_path / "r").scrapes == 1


def test_files_of_others_in_the_folder_are_kept(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Recorder(tmp_path / "r"):
        (tmp_path / "r" / "notes.txt").write_text("mine")
        raise KeyboardInterrupt
    assert [file.name for file in (tmp_path / "r").iterdir()] == ["notes.txt"]
