"""`diag ramp --attach` on servers that were recorded under load from other clients."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support import rewriting, simulated_vllm
from support.offered_load import Change, offered
from support.paths import ALL_RECORDINGS, RECORDINGS
from support.sampling import some
from support.scenarios import fixes
from support.schemas import validator
from support.surfaces import false_sentences

from diag.commands import doctor
from diag.commands import ramp as work
from diag.commands.observe import ObserveOptions
from diag.commands.options import RampOptions
from diag.core.contract import Contract
from diag.core.errors import BadUsage
from diag.diagnosis.proposals import Running
from diag.ramp.analysis import Circumstances, conclude
from diag.ramp.plan import Limits, request_lengths
from diag.ramp.results import ClientResult, GeneratorUse, Offer
from diag.ramp.step import Step, measure
from diag.report import ramp as text
from diag.sources.observation import Observation
from diag.sources.recording.reader import read

SCHEMA = validator(Path(text.__file__).parent / "diag.ramp.schema.json")


def ramped(name: str | Path) -> tuple[work.Ramp, dict[str, Any]]:
    found = work.run(RampOptions(attach=True), ObserveOptions([str(RECORDINGS / name)]))
    document = text.DOCUMENT.of(found)
    SCHEMA.validate(document)
    return found, document


@pytest.mark.parametrize(
    ("name", "binds", "flag", "after"),
    [
        ("kv_saturated_fit", "kv_cache", "--num-gpu-blocks-override", None),
        ("kv_cascade", "kv_cache", "--num-gpu-blocks-override", None),
        # 24 requests at a time double twice to 96; 161 would fit the KV cache
        ("queue_saturation", "sequence_cap", "--max-num-seqs", 128),
        ("contention_smallbatch", "token_budget", "--max-num-batched-tokens", 512),
        ("api_server_bound", "api_server", "--api-server-count", 6),
    ],
)
def test_ramp_names_the_binding_resource_and_the_flag(name: str, binds: str, flag: str, after: float | None) -> None:
    _, document = ramped(name)
    assert document["binds"]["id"] == binds
    assert (document["binds"]["changes"][0]["flag"], document["binds"]["changes"][0]["after"]) == (flag, after)
    assert document["next"] != binds


@pytest.mark.parametrize("name", some(sorted(path.name for path in ALL_RECORDINGS), 12))
def test_no_text_of_a_ramp_has_a_sentence_that_cannot_be_true_or_read(name: str) -> None:
    try:
        found, _ = ramped(name)
    except BadUsage:  # of two servers
        return
    assert not false_sentences(text.render(found), name)
    assert not false_sentences(re.sub(r"\\(?=[\W_])|`[^`]*`", "", text.render_markdown(found)), name)
    page = text.render_html(found).partition("<body>")[2]
    assert not false_sentences(re.sub(r"<svg.*?</svg>|<[^>]*>", "\n", page, flags=re.DOTALL), name)


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


def test_steps_of_a_sparse_recording_are_longer(tmp_path: Path) -> None:
    """Two scrapes in 30 s would be too few for any conclusion."""
    folder = rewriting.write(tmp_path, list(rewriting.scrapes("queue_saturation"))[::5])
    shutil.copy(RECORDINGS / "queue_saturation" / "recording.toml", folder)
    _, document = ramped(folder)
    assert document["binds"]["id"] == "sequence_cap"
    assert [step["unusable"] for step in document["steps"]] == [""]


@pytest.mark.parametrize("name", ["healthy", "healthy_after_cascade", "healthy_vllm_0_20_2", "admission_deadlock"])
def test_server_below_its_ceiling_has_no_binding_resource(name: str) -> None:
    found, document = ramped(name)
    assert document["binds"] is None
    assert "no limit was reached" in " ".join(text.render(found).split())


# -- steps of a load generator on a simulated server ------------------------------------------------------------------

LIMITS = Limits(Contract(ttft_seconds=10.0), seconds=10.0)
CAP = simulated_vllm.Limits(max_num_seqs=8)
TAIL = [150] * 23 + [1000]
"""The last answer takes as long as five others."""
CLIENT = ClientResult(24, 0, 30.0, 1.3, 210.0)


def step(seen: Observation, concurrency: int, client: ClientResult | None = CLIENT) -> Step:
    found = measure(Offer(concurrency=concurrency), seen, LIMITS.contract, client)
    assert found
    return found


def concluded(*steps: Step) -> tuple[work.Ramp, dict[str, Any]]:
    known = Circumstances("sim", running={"sim": Running("0.32.0", "vllm serve sim --max-num-seqs 8", whole=True)})
    found = conclude(steps, LIMITS, known)
    document = text.DOCUMENT.of(found)
    SCHEMA.validate(document)
    return found, document


def test_start_and_end_of_the_generator_do_not_count(tmp_path: Path) -> None:
    """An average of the whole step has 2.1 of four requests in flight, and blamed the client for it."""
    measured = step(offered(tmp_path, CAP, 4, TAIL), 4)
    assert measured.in_flight == 4.0
    assert measured.requests_per_second == pytest.approx(4 / (150 * 0.0186), rel=0.02), "a step takes 18.6 ms"
    _, document = concluded(measured)
    assert document["binds"] is None
    assert {"id": "client", "state": "ruled out"}.items() <= document["candidates"][0].items()


def test_a_client_that_keeps_fewer_requests_in_flight_binds(tmp_path: Path) -> None:
    measured = step(offered(tmp_path, CAP, 4, TAIL), 16)
    assert measured.in_flight == pytest.approx(4.0, abs=0.3), "without the tail"
    found, document = concluded(measured)
    assert document["binds"]["id"] == "client"
    assert "4 of 16 offered requests are in flight" in text.render(found)


def test_a_step_without_a_steady_part_is_too_short_and_names_no_binder(tmp_path: Path) -> None:
    measured = step(offered(tmp_path, CAP, 16, [150] * 20), 16)
    assert (measured.is_short, measured.queries) == (True, None)
    found, document = concluded(measured)
    assert (document["binds"], document["ceiling"], document["candidates"]) == (None, None, [])
    assert "--step-seconds 20" in document["steps"][0]["unusable"]
    shown = " ".join(text.render(found).split())
    assert re.search(r"cannot tell: all offered requests were in flight at \d scrapes?, and 4 are needed", shown)


def test_requests_that_only_the_generator_lost_are_no_failures(tmp_path: Path) -> None:
    """The generator reported 118 of 2,946 as failed; the server had answered each with 200."""
    seen = offered(tmp_path, CAP, 4, TAIL)
    lost = CLIENT._replace(completed=2828, failed=118)
    measured = step(seen, 4, lost)
    assert measured.failures
    assert (measured.failures.failed, measured.failures.by) == (0, "server")
    assert measured.breaches(LIMITS.contract) == []
    assert "failed" not in text.render(concluded(measured)[0])


def failing(page: str, seconds: float) -> str:
    """One in four requests is answered with 503, one in ten with 422, from the fifth second on."""
    served = float(next(re.finditer(r"^http_requests_total{.*} (.*)$", page, re.MULTILINE))[1])
    route = 'http_requests_total{handler="/v1/completions",method="POST",status='
    errors = f'{route}"5xx"}} {served // 4}\n{route}"4xx"}} {served // 10}\n'
    return page + (errors if seconds > 5 else "")


def test_failures_are_what_the_server_answers(tmp_path: Path) -> None:
    measured = step(offered(tmp_path, CAP, 4, TAIL, change=failing), 4)
    assert measured.failures
    assert measured.failures.failed == pytest.approx(8, abs=1)
    (breach,) = measured.breaches(LIMITS.contract)
    assert breach.sentence.endswith("of the answers are HTTP errors (4xx or 5xx)")


def cut(page: str, seconds: float) -> str:
    """A server without http_requests_total, two of whose requests are cut off at the end of the step."""
    page = re.sub(r"^http_requests_total.*\n", "", page, flags=re.MULTILINE)
    aborted = r'^(vllm:request_success_total{.*finished_reason="abort".*}) .*$'
    return re.sub(aborted, rf"\1 {2 if seconds > 22 else 0}", page, flags=re.MULTILINE)


def test_without_answers_on_the_page_the_generator_counts_what_it_did_not_cut(tmp_path: Path) -> None:
    seen = offered(tmp_path, CAP, 4, TAIL, change=cut)
    assert step(seen, 4, CLIENT._replace(failed=2)).failures == (0, 24, "client")
    measured = step(seen, 4, CLIENT._replace(failed=6))
    assert measured.failures == (4, 28, "client")
    assert "as the load generator counts" in measured.breaches(LIMITS.contract)[0].sentence


def crowded_by(waits: float, pressure: float) -> Change:
    """Add a process of vLLM that waits for a CPU for a share of the time."""
    name = 'diag_vllm_process_cpu_wait_seconds_total{pid="7",role="engine",rank="0"}'

    def change(page: str, seconds: float) -> str:
        return f'{page}{name} {100 + waits * seconds}\ndiag_host_pressure_ratio{{resource="cpu"}} {pressure}\n'

    return change


@pytest.mark.parametrize(("waits", "pressure", "worthless"), [(0.7, 0.95, True), (0.7, 0.3, False), (0.3, 0.95, False)])
def test_a_step_on_a_crowded_host_names_no_binder(
    tmp_path: Path, waits: float, pressure: float, worthless: bool
) -> None:
    seen = offered(tmp_path, CAP, 16, [150] * 96, change=crowded_by(waits, pressure))
    found, document = concluded(step(seen, 16))
    if worthless:
        assert (document["binds"], document["ceiling"]) == (None, None)
        shown = " ".join(text.render(found).split())
        assert "a process of vLLM waited for a CPU for 70 % of the time, under a CPU pressure of 95 %" in shown
        assert "crowded host" in shown
        assert "--max-num-seqs" not in shown
    else:
        assert document["binds"]["id"] == "sequence_cap"


def test_a_step_is_worthless_if_the_generator_waits_for_a_cpu(tmp_path: Path) -> None:
    seen = offered(tmp_path, CAP, 16, [150] * 96)
    times = seen.instants / 1000
    uses = [GeneratorUse(at, 0.2 * (at - times[0]), 0.6 * (at - times[0]), 0.9) for at in times]
    measured = step(seen, 16, CLIENT._replace(uses=tuple(uses)))
    assert measured.client
    assert measured.client.cores == pytest.approx(0.2)
    found, _ = concluded(measured)
    assert found.binds is None
    assert "the load generator waited for a CPU for 60 % of the time" in found.unusable
    calm = [use._replace(pressure=0.1) for use in uses]
    assert concluded(step(seen, 16, CLIENT._replace(uses=tuple(calm))))[0].binds


@pytest.mark.parametrize(
    ("blocks", "after", "change"),
    [(20_000, 64, "Admit what the next two doublings"), (480, 25, "Admit as many requests as the KV cache holds")],
)
def test_a_proposed_sequence_cap_is_what_the_next_steps_need(
    tmp_path: Path, blocks: int, after: float, change: str
) -> None:
    """A cap of 8 under 16 requests at a time: 2,048 would have fit the KV cache of 20,000 blocks."""
    seen = offered(tmp_path, replace(CAP, num_gpu_blocks=blocks), 16, [150] * 96)
    _, document = concluded(step(seen, 16))
    assert document["binds"]["id"] == "sequence_cap"
    proposed = document["binds"]["changes"][0]
    assert (proposed["flag"], proposed["before"], proposed["after"]) == ("--max-num-seqs", 8, after)
    assert proposed["text"].startswith(change)


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
