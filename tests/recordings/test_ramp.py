"""`diag ramp --attach` on servers that were recorded under load from other clients."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support import rewriting
from support.paths import RECORDINGS
from support.scenarios import fixes
from support.schemas import validator

from diag.commands import doctor
from diag.commands import ramp as work
from diag.commands.observe import ObserveOptions
from diag.ramp.plan import request_lengths
from diag.report import ramp as text
from diag.sources.recording.reader import read

SCHEMA = validator(Path(text.__file__).parent / "diag.ramp.schema.json")


def ramped(name: str | Path) -> tuple[work.Ramp, dict[str, Any]]:
    found = work.run(work.RampOptions(ObserveOptions([str(RECORDINGS / name)]), attach=True))
    document = text.document(found)
    SCHEMA.validate(document)
    return found, document


@pytest.mark.parametrize(
    ("name", "binds", "flag", "after"),
    [
        ("kv_saturated_fit", "kv_cache", "--num-gpu-blocks-override", None),
        ("kv_cascade", "kv_cache", "--num-gpu-blocks-override", None),
        ("queue_saturation", "sequence_cap", "--max-num-seqs", 32),  # 24 clients; memory has room for 161
        ("contention_smallbatch", "token_budget", "--max-num-batched-tokens", 512),
        ("api_server_bound", "api_server", "--api-server-count", 6),
    ],
)
def test_ramp_names_the_binding_resource_and_the_flag(name: str, binds: str, flag: str, after: float | None) -> None:
    _, document = ramped(name)
    assert document["binds"]["id"] == binds
    assert (document["binds"]["changes"][0]["flag"], document["binds"]["changes"][0]["after"]) == (flag, after)
    assert document["next"] != binds


def one_ends_in_each_step(page: str) -> str:
    """Return pages with short answers: three of four requests in a step still run when vLLM counts them."""
    ended = sum(map(float, re.findall(r"^vllm:request_success_total{.*} (.*)$", page, re.MULTILINE)))
    page = re.sub(r"^(vllm:iteration_tokens_total_count{.*}) .*$", rf"\1 {ended}", page, flags=re.MULTILINE)
    return re.sub(r"^(vllm:num_requests_running{.*}) 4.0$", r"\1 3.0", page, flags=re.MULTILINE)


def test_requests_that_finish_in_a_step_count_as_running(tmp_path: Path) -> None:
    folder = rewriting.write(tmp_path, rewriting.changed(rewriting.scrapes("queue_saturation"), one_ends_in_each_step))
    shutil.copy(RECORDINGS / "queue_saturation" / "recording.toml", folder)
    _, document = ramped(folder)
    assert document["binds"]["id"] == "sequence_cap"
    report = doctor.run(ObserveOptions([str(folder)]))
    assert "--max-num-seqs" in fixes(report, "queue_saturation")


@pytest.mark.parametrize("name", ["healthy", "healthy_after_cascade", "healthy_vllm_0_20_2", "admission_deadlock"])
def test_server_below_its_ceiling_has_no_binding_resource(name: str) -> None:
    found, document = ramped(name)
    assert document["binds"] is None
    assert "nothing yet" in text.render(found)


def test_a_page_without_network_and_script_has_its_curves() -> None:
    page = text.render_html(ramped("queue_saturation")[0])
    root = ElementTree.fromstring(page.partition("\n")[2])
    assert len(list(root.iter("svg"))) == 6
    assert "sequence cap" in page
    assert "<script" not in page


def test_a_screen_is_at_most_100_columns_wide() -> None:
    assert max(map(len, text.render(ramped("kv_saturated_fit")[0]).splitlines())) <= 100


def test_an_idle_recording_has_no_ceiling() -> None:
    found, document = ramped("idle")
    assert (work.exit_code(found), document["ceiling"], document["steps"]) == (3, None, [])


def test_ramp_command_prints_the_report() -> None:
    command = [str(Path(sys.executable).parent / "diag"), "ramp", str(RECORDINGS / "queue_saturation"), "--attach"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sequence cap" in done.stdout


def test_requests_have_the_lengths_of_the_server_unless_set() -> None:
    own = request_lengths(read(RECORDINGS / "healthy"), None, None)
    assert (own.prompt, own.output, own.prefix) == (172, 51, 0)
    assert own.spread == pytest.approx(0.84, abs=0.01), "30 to 300 and 20 to 80 tokens, drawn evenly"
    given = request_lengths(read(RECORDINGS / "healthy"), 100, 10)
    assert given.shown == "100 + 10 tokens a request (as given)"
    assert "assumed" in request_lengths(read(RECORDINGS / "idle"), None, None).source


def test_no_request_is_longer_than_the_context() -> None:
    found = request_lengths(read(RECORDINGS / "kv_cascade"), 100_000, 100_000)
    assert found.prompt + found.output <= 2048
    assert "cut to --max-model-len" in found.source
