"""`python -m tests.gpu`: parts without a card run over the scripted driver; an archive is judged elsewhere."""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from gpu.__main__ import pack
from support.paths import RECORDINGS, ROOT

pytestmark = pytest.mark.slow


def run(*arguments: str, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    program = ("-m", "tests.gpu") if where == ROOT else (str(ROOT / "tests" / "gpu"),)
    command = [sys.executable, *program, *arguments]
    return subprocess.run(command, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def rows(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line[:3] in ("a  ", "b  ", "c  ", "d  ")]


@pytest.mark.nightly
def test_a_scripted_card_is_recorded_and_its_archive_is_judged(tmp_path: Path) -> None:
    recorded = run(str(tmp_path / "card"), "--scripted")
    assert recorded.returncode == 0, recorded.stdout
    assert "power: seconds limited by the power cap, per second" in recorded.stdout
    judged = run("card.tar.gz", "--judge", where=tmp_path)
    assert judged.returncode == 0
    assert rows(recorded) == rows(judged)
    again = run(str(tmp_path / "card"), "--scripted")
    assert (again.returncode, again.stdout.endswith("card is there already\n")) == (2, True)
    # the table tells a wrong value: the page under load is not that of an idle card
    (tmp_path / "card" / "idle").rename(tmp_path / "card" / "away")
    (tmp_path / "card" / "power").rename(tmp_path / "card" / "idle")
    # what a busy host did not read is no wrong value of the card
    (tmp_path / "card" / "pcie" / "not_read").touch()
    wrong = run(str(tmp_path / "card"), "--judge")
    assert wrong.returncode == 1
    assert "idle: utilisation" in next(line for line in wrong.stdout.splitlines() if line.endswith("DIFFERS"))
    assert next(row for row in rows(wrong) if "PCIe" in row).endswith("cannot tell: not read in 60 s")


def test_each_stage_of_a_server_has_its_verdict_and_its_alerts_and_what_is_missing_is_named(tmp_path: Path) -> None:
    truths = {
        "healthy": ("h100_healthy", "healthy", []),
        "kv_cascade": ("h100_kv_cascade", "critical", ["kv_eviction_cascade"]),
        "engine_stopped": ("h100_queue", "critical", ["engine_stalled"]),  # which is not what happened there
    }
    for stage, (recording, verdict, present) in truths.items():
        shutil.copytree(RECORDINGS / recording, tmp_path / "run" / stage)
        about = tmp_path / "run" / stage / "recording.toml"
        truth = f'[truth]\nverdict = "{verdict}"\npresent = {present}\n'
        about.write_text(about.read_text(encoding="utf-8").partition("[truth]")[0] + truth, encoding="utf-8")
    missing = {"queue": "vLLM ended with 1: eager.log", "killed": "time is up: 25 s are needed, 3 s were left"}
    (tmp_path / "run" / "not_recorded.json").write_text(json.dumps(missing), encoding="utf-8")
    ceilings = {"name": "NVIDIA H100 80GB HBM3", "bf16_teraflops": 673.9, "bandwidth_gigabytes": 1000.0}
    (tmp_path / "run" / "ceilings.json").write_text(json.dumps(ceilings), encoding="utf-8")
    judged = run(str(tmp_path / "run"), "--judge")
    marks = {line[3:61].rstrip(): line.rpartition("  ")[2] for line in rows(judged)}
    assert {what for what, mark in marks.items() if mark == "DIFFERS"} == {
        "bandwidth_gigabytes",
        "engine_stopped",
        "engine_stopped: alerts",
        "queue",
    }
    assert {what for what, mark in marks.items() if mark == "as expected"} == {
        *("bf16_teraflops", "healthy", "healthy: alerts", "kv_cascade", "kv_cascade: alerts")
    }
    assert judged.returncode == 1


def test_an_archive_has_no_secrets(tmp_path: Path) -> None:
    (tmp_path / "run" / "healthy").mkdir(parents=True)
    text = "non-default args: {'api_key': ['sk-0123456789abcdef'], 'port': 8000}\nmodel at /home/ann/models\nlast"
    (tmp_path / "run" / "healthy" / "server.log").write_text(text, encoding="utf-8")
    with tarfile.open(pack(tmp_path / "run")) as tar:
        content = tar.extractfile("run/healthy/server.log")
        assert content
        packed = content.read().decode()
    assert "sk-0123456789abcdef" not in packed
    assert packed.splitlines()[1:] == ["model at ~/models", "last"]


def test_a_run_ends_in_its_time_and_names_what_it_left_out(tmp_path: Path) -> None:
    vllm = ("--vllm", "/bin/false", "--cpu", "--minutes", "0")
    done = run(str(tmp_path / "late"), "--scripted", "--parts", "d", *vllm)
    assert done.returncode == 0, done.stdout
    told = {row[3:61].rstrip(): row.partition("not recorded: ")[2] for row in rows(done)}
    assert {*told} == {
        *("healthy", "engine_stopped", "engine_killed", "kv_cascade"),
        *("healthy_eager", "long_prefills", "queue_at_the_cap"),
    }
    assert {*told.values()} == {"time is up"}
    assert done.stdout.count("7 rows, 0 differ, 7 without an answer") == 1
