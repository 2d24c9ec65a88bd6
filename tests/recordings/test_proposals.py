"""A fix becomes a concrete value, from this server's numbers, for this server's release, or says what it needs."""

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import rewriting
from support.rewriting import pages_alone

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract
from diag.core.incident import Fix, Signal, judged
from diag.diagnosis.diagnose import diagnose
from diag.diagnosis.proposals import FlagChange, Proposal, Running, available, propose
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.relaunch import relaunch
from diag.diagnosis.report import Finding
from diag.knowledge.catalog import _check_alone, load
from diag.knowledge.signals import running_value, tokens_of_one_prompt_within_pause, tokens_prefilled_within_pause
from diag.report import markdown, terminal
from diag.sources.recording.reader import read
from diag.vllm.command.shell import line as line_of


@cache
def primary(recording: str, launch: str = "") -> Finding:
    return doctor.run(ObserveOptions([str(Path("tests") / "recordings" / recording)], launch=launch)).present[0]


def proposed(finding: Finding, flag: str) -> Proposal:
    return next(each for each in finding.proposals if each.fix.flag == flag)


@pytest.mark.parametrize("recording", ["kv_cascade", "kv_cascade_base"])
def test_sequence_cap_is_the_kv_cache_size_at_the_mean_length(recording: str) -> None:
    fix = proposed(primary(recording), "--max-num-active-seqs")
    assert (fix.before, fix.after) == (None, 6)  # 4,096 tokens x 0.9 / 620 a request; 6 is what was measured to cure it


def test_the_long_prefill_threshold_comes_from_the_measured_prefill_rate() -> None:
    assert proposed(primary("contention_bigbatch"), "--long-prefill-token-threshold").after == 256


def test_a_cap_is_raised_to_what_the_load_needs_and_the_kv_cache_holds() -> None:
    fix = proposed(primary("queue_saturation"), "--max-num-seqs")
    assert (fix.before, fix.after) == (4, 32)  # 24 clients; the KV cache holds 161 of their requests
    assert "the next limit is the token budget" in fix.text
    fix = proposed(primary("cure_max_num_seqs_p90"), "--max-num-seqs")
    assert (fix.before, fix.after) == (3, 6)  # 28 clients


def test_requests_that_end_in_a_step_do_not_hide_an_unknown_cap(tmp_path: Path) -> None:
    """A scrape shows 32, 31 or 30 requests at a cap of 32 that no source shows: some end in the step before it."""
    pages = list(rewriting.thinned(rewriting.scrapes("queue_saturation"), 2))
    shown = [32, 32, 31, 32, 32, 30, 32, 31, 32, 32]

    def seen(at: int, page: str) -> str:
        page = rewriting.with_value(page, "vllm:num_requests_running{", f"{shown[at % 10]}.0")
        return rewriting.with_value(page, "vllm:iteration_tokens_total_count{", f"{40 * at}.0")

    folder = rewriting.write(tmp_path / "cap", ((t, host, seen(at, page)) for at, (t, host, page) in enumerate(pages)))
    (finding,) = (
        each
        for each in doctor.run(ObserveOptions([str(folder)])).present
        if each.diagnosis.incident.id == "queue_saturation"
    )
    assert {each.name: each.before for each in finding.proposals}["--max-num-seqs"] == 32


def test_a_mean_of_one_huge_request_does_not_hide_the_cap(tmp_path: Path) -> None:
    """A prompt that fills two KV caches is in the mean; as many requests as the cap admits run, with free blocks."""
    scrapes = list(rewriting.scrapes("queue_saturation"))
    start = scrapes[0][0]

    def with_huge_prompts(time: float, page: str) -> str:
        tokens = 100_000 * (time - start)
        return rewriting.with_value(page, "vllm:request_prompt_tokens_sum{", f"{tokens}")

    folder = rewriting.write(tmp_path, ((time, host, with_huge_prompts(time, page)) for time, host, page in scrapes))
    shutil.copy(Path("tests") / "recordings" / "queue_saturation" / "recording.toml", folder)
    finding = doctor.run(ObserveOptions([str(folder)])).present[0]
    assert finding.diagnosis.incident.id == "queue_saturation"
    assert proposed(finding, "--max-num-seqs").after == 32


def test_proposals_are_ordered_capacity_sequence_cap_watermark() -> None:
    flags = [each.fix.flag for each in primary("kv_cascade").proposals]
    assert flags.index("--num-gpu-blocks-override") < flags.index("--max-num-active-seqs") < flags.index("--watermark")


def test_fixes_without_a_restart_come_first() -> None:
    first = primary("kv_cascade").proposals[0]
    assert (first.fix.restart, first.after) == (False, 6)
    assert "Limit gateway concurrency to 6 per engine" in first.text
    first = primary("contention_bigbatch").proposals[0]
    assert (first.fix.restart, first.after) == (False, 256)


def of_a_server_without_log(tmp_path: Path, launch: str = "vllm serve m") -> Finding:
    """A cascade of which nothing but its page and its launch command is known."""
    alone = str(pages_alone(tmp_path, "kv_cascade"))
    return doctor.run(ObserveOptions([alone], launch=launch)).present[0]


def test_fix_with_unmeasured_inputs_names_them(tmp_path: Path) -> None:
    assert proposed(of_a_server_without_log(tmp_path), "--kv-cache-dtype").needs


def test_fix_without_a_computable_value_is_left_out_and_verbose_names_its_telemetry(tmp_path: Path) -> None:
    finding = of_a_server_without_log(tmp_path)
    assert not [each.name for each in finding.proposals if not each.is_computed]
    assert "GPU memory free" in next(each.needs for each in finding.uncomputed if "bytes" in each.name)
    report = doctor.run(ObserveOptions([str(tmp_path)], launch="vllm serve m"))
    said = "--kv-cache-memory-bytes: "
    assert "?" not in terminal.render(report)
    assert said not in terminal.render(report) + markdown.render(report)
    assert said in terminal.render(report, verbose=True)
    assert said in markdown.render(report, verbose=True)


@pytest.mark.parametrize("launch", ["vllm serve m", "VLLM_CPU_KVCACHE_SPACE=1 vllm serve m"])
def test_cpu_server_gets_no_fix_that_depends_on_gpus(tmp_path: Path, launch: str) -> None:
    found = of_a_server_without_log(tmp_path, launch) if "CPU" in launch else primary("kv_cascade", launch)
    named = {each.fix.flag for each in (*found.proposals, *found.uncomputed)}
    assert "--num-gpu-blocks-override" in named
    assert named.isdisjoint({"--kv-cache-dtype", "--gpu-memory-utilization", "--kv-cache-memory-bytes"})


def test_a_watermark_that_is_set_is_raised_to_the_growth_of_the_running_requests() -> None:
    fix = proposed(primary("cure_watermark"), "--watermark")
    assert (fix.before, fix.after) == (0.05, 0.08)  # a mean answer of 350 tokens in a pool of 4,096


def test_the_relaunch_line_is_the_launch_command_with_the_first_complete_flag() -> None:
    line = primary("kv_cascade").relaunch
    assert line is not None
    assert "--num-gpu-blocks-override" not in line
    assert "--block-size 32" in line


CASCADE = Path("tests") / "recordings" / "kv_cascade"
LAUNCH = "vllm serve m --num-gpu-blocks-override 128 --max-num-seqs 64"


@cache
def asked() -> QueryCache:
    seen = read(CASCADE)
    return QueryCache(seen, Contract())


def number(value: float) -> Signal:
    """A signal that is this number on every server."""
    return Signal(f"number {value:g}", f"{value} + 0 * max by (instance) (last_over_time(up[$window]))", "{value}")


NOTHING = Signal("nothing", "max by (instance) (last_over_time(not_there[$window]))", "{value}")


def fix(**told: Any) -> Fix:
    return Fix(**{"change": "Do {value}.", "effect": "it helps", "why": judged("a test"), **told})


def proposals(*fixes: Fix, version: str = "0.32.0", whole: bool = True, launch: str = LAUNCH) -> tuple[Proposal, ...]:
    """Return the proposals for the recorded cascade with these fixes."""
    incident = next(each for each in load() if each.id == "kv_eviction_cascade")._replace(fixes=fixes)
    diagnosis = next(each for each in diagnose([incident], asked()) if each.state == "present")
    return propose(diagnosis, asked(), Running(version, launch, whole))


@pytest.mark.parametrize(
    ("told", "after"),
    [
        ({"value": number(7.4)}, 7),
        ({"value": number(7.4), "rounding": "up"}, 8),
        ({"value": number(8), "rounding": "up"}, 8),
        ({"value": number(1000), "rounding": "power_of_two_below"}, 512),
        ({"value": number(0.839), "rounding": "hundredth_below", "least": 0}, 0.83),
        ({"value": number(0.58), "rounding": "hundredth_below", "least": 0}, 0.58),  # 57.99... in binary
        ({"value": number(3), "least": 5}, 5),
        ({"value": number(3), "least": number(5)}, 5),
        ({"value": number(9), "most": 5}, 5),
        ({"value": number(9), "most": number(5)}, 5),
        ({"value": number(0.2)}, 1),
    ],
)
def test_a_value_is_rounded_and_held_within_its_bounds(told: dict[str, Any], after: float) -> None:
    (only,) = proposals(fix(flag="--block-size", **told))
    assert (only.after, only.needs, only.computed) == (after, (), True)


@pytest.mark.parametrize("bound", ["least", "most"])
def test_a_bound_that_is_not_known_is_a_need(bound: str) -> None:
    (only,) = proposals(fix(flag="--block-size", value=number(3), **{bound: NOTHING}))
    assert (only.after, only.needs) == (3, ("nothing",))


def test_a_value_that_cannot_be_computed_is_a_need() -> None:
    (only,) = proposals(fix(flag="--block-size", value=NOTHING))
    assert (only.after, only.needs, only.computed, only.text) == (None, ("nothing",), False, "Do ?.")


@pytest.mark.parametrize(
    ("direction", "value", "proposed"),
    [("lower", 63, True), ("lower", 64, False), ("lower", 65, False), ("raise", 65, True), ("raise", 64, False)],
)
def test_proposal_is_never_worse_than_the_running_value(direction: str, value: float, proposed: bool) -> None:
    assert bool(proposals(fix(flag="--max-num-seqs", value=number(value), direction=direction))) is proposed


def test_unpublished_flag_has_the_default_of_its_release() -> None:
    """A watermark is on no page, and not in the launch command."""
    (only,) = proposals(fix(flag="--watermark", value=0.05, direction="raise"))
    assert (only.before, only.assumed, only.needs) == (0.0, True, ())
    assert only.changes == (FlagChange("--watermark", 0.0, 0.05, assumed=True),)
    assert not proposals(fix(flag="--watermark", value=0.0, direction="raise"))


def test_change_relative_to_an_unknown_value_is_a_need() -> None:
    """A threshold is 0 in every release; nothing tells how many log probabilities are allowed."""
    (only,) = proposals(fix(flag="--long-prefill-token-threshold", value=256, direction="lower"), version="")
    assert only.needs == ()
    (only,) = proposals(fix(flag="--max-logprobs", value=9, direction="lower"))
    assert only.needs == ("the current --max-logprobs",)


@pytest.mark.parametrize(
    ("flag", "value"), [("--enforce-eager", 0), ("--stream-interval", 1), ("--kv-offloading-size", 0)]
)
def test_unset_flag_has_its_default_if_all_set_flags_are_known(flag: str, value: float) -> None:
    """None of the three is on the recorded page."""
    signal = running_value("not_on_the_page")._replace(name=flag)
    holds, does_not = (fix(only_if=(signal.at_most(limit, judged("a test")),)) for limit in (value, value - 1))
    assert [each.needs for each in proposals(holds, does_not)] == [()]
    assert [each.needs for each in proposals(holds, does_not, whole=False)] == [(flag,), (flag,)]


@pytest.mark.parametrize(
    ("launch", "proposed"),
    [
        ("vllm serve m -tp 4", True),
        ("vllm serve m -tp 4 -dcp 1", True),
        ("vllm serve m -tp 4 -dcp 2", False),
        ("vllm serve m -tp 4 -dcp $RANKS", True),
    ],
)
def test_a_flag_that_no_source_publishes_is_read_in_the_command(launch: str, proposed: bool) -> None:
    signal = running_value("decode_context_parallel_size")
    one = fix(flag="--block-size", value=16.0, only_if=(signal.at_most(1, judged("a test")),))
    assert bool(proposals(one, launch=launch)) is proposed
    assert not proposals(one._replace(value=number(3), most=signal), launch="vllm serve m -dcp 4 --block-size 3")
    (bounded,) = proposals(fix(flag="--block-size", value=number(9), most=signal), launch="vllm serve m -dcp 4")
    assert bounded.after == 4


def test_a_setting_that_is_not_in_this_release_is_not_set() -> None:
    signal = running_value("decode_context_parallel_size")
    (only,) = proposals(fix(only_if=(signal.at_most(1, judged("a test")),)), version="0.10.1")
    assert only.needs == ()


@pytest.mark.parametrize(
    ("told", "needs"),
    [
        ({"flag": "--watermark"}, ("the vLLM version",)),
        ({"flag": "--swap-space"}, ("the vLLM version",)),
        ({"flag": "--compilation-config.cudagraph_mode", "versions": ("0.10.1", "")}, ("the vLLM version",)),
        ({"flag": "--block-size", "also": (("--watermark", number(1)),)}, ("the vLLM version",)),
        ({"flag": "--block-size"}, ()),
        ({"environment": "NCCL_P2P_DISABLE", "versions": ("0.10.1", "")}, ()),
    ],
)
def test_flag_of_some_releases_needs_the_version(told: dict[str, Any], needs: tuple[str, ...]) -> None:
    for version in ("", "nightly"):
        (only,) = proposals(fix(value=5.0, **told), version=version)
        assert only.needs == needs
    assert all(each.needs == () for each in proposals(fix(value=5.0, **told), version="0.32.0"))


def test_a_variable_is_raised_from_what_the_command_sets() -> None:
    longer = fix(environment="VLLM_ENGINE_READY_TIMEOUT_S", value=number(2598), direction="raise")
    assert not proposals(longer, launch="VLLM_ENGINE_READY_TIMEOUT_S=7200 vllm serve m")
    (only,) = proposals(longer, launch="docker run -e VLLM_ENGINE_READY_TIMEOUT_S=900 vllm/vllm-openai --model m")
    assert (only.before, only.after) == (900, 2598)
    (only,) = proposals(longer, launch="vllm serve m")
    assert (only.before, only.after) == (None, 2598)


@pytest.mark.parametrize(
    ("launch", "before"),
    [
        ("vllm serve m --compilation-config.cudagraph_mode=PIECEWISE", "same"),
        ("""vllm serve m -cc '{"cudagraph_mode": "PIECEWISE"}'""", "same"),
        ("vllm serve m -cc.cudagraph_mode FULL", "FULL"),
        ("vllm serve m -cc.cudagraph_mode '\x1b]0;x'", None),
        ("vllm serve m -cc.mode 3", None),
    ],
)
def test_current_value_is_not_proposed(launch: str, before: str | None) -> None:
    found = proposals(fix(flag="--compilation-config.cudagraph_mode", value="PIECEWISE"), launch=launch)
    assert [each.before for each in found] == ([] if before == "same" else [before])


def test_unset_size_has_its_default_if_all_set_flags_are_known() -> None:
    smaller = fix(flag="--max-cudagraph-capture-size", value=number(256), direction="lower")
    assert [each.needs for each in proposals(smaller)] == [()]
    assert [each.needs for each in proposals(smaller, whole=False)] == [("the current --max-cudagraph-capture-size",)]
    assert not proposals(smaller, launch="vllm serve m --max-cudagraph-capture-size 64")


def test_flag_with_the_right_value_is_not_part_of_a_proposal() -> None:
    (only,) = proposals(fix(flag="--block-size", value=16.0, also=(("--max-num-seqs", number(64)),)))
    assert [each.name for each in only.changes] == ["--block-size"]


def test_flags_that_go_together_change_together() -> None:
    halves = fix(flag="--pipeline-parallel-size", value=2.0, also=(("--tensor-parallel-size", number(2)),))
    (only,) = proposals(halves)
    assert relaunch("vllm serve m -tp 4 --port 1", [only]) == (
        "vllm serve m --tensor-parallel-size 2 --port 1 --pipeline-parallel-size 2"
    )
    (only,) = proposals(halves._replace(also=(("--tensor-parallel-size", NOTHING),)))
    assert only.needs == ("nothing",)
    assert relaunch("vllm serve m -tp 4", [only]) is None


@pytest.mark.parametrize(
    ("told", "version", "proposed"),
    [
        ({"flag": "--watermark"}, "0.23.0", False),
        ({"flag": "--watermark"}, "0.24.0", True),
        ({"flag": "--watermark"}, "0.24", True),
        ({"flag": "--watermark"}, "v0.33.0rc1+cpu", True),
        ({"flag": "--watermark"}, "0.40.0", True),  # newer than all that are known, which kept it
        ({"flag": "--watermark"}, "", True),
        ({"flag": "--swap-space"}, "0.17.1", True),
        ({"flag": "--swap-space"}, "0.18.0", False),
        ({"flag": "--compilation-config.cudagraph_mode", "versions": ("0.10.1", "")}, "0.10.0", False),
        ({"flag": "--compilation-config.cudagraph_mode", "versions": ("0.10.1", "")}, "0.10.1", True),
        ({"environment": "VLLM_USE_V1", "versions": ("", "0.11.0")}, "0.11.0", True),
        ({"environment": "VLLM_USE_V1", "versions": ("", "0.11.0")}, "0.11.1", False),
        ({"flag": "--max-num-seqs", "instead_of": "--max-num-active-seqs"}, "0.31.0", False),
        ({"flag": "--max-num-seqs", "instead_of": "--max-num-active-seqs"}, "0.30.0", True),
        ({"flag": "--max-num-seqs", "instead_of": "--max-num-active-seqs"}, "", True),
        ({"flag": "--block-size", "also": (("--watermark", NOTHING),)}, "0.23.0", False),
    ],
)
def test_a_fix_is_proposed_to_the_releases_that_accept_it(told: dict[str, Any], version: str, proposed: bool) -> None:
    assert available(fix(**told), version) is proposed
    assert bool(proposals(fix(value=5.0, **told), version=version)) is proposed


def changed(launch: str, *changes: FlagChange) -> str | None:
    return relaunch(launch, [Proposal(fix(), None, None, (), False, "", changes=changes)])


@pytest.mark.parametrize(
    ("launch", "line"),
    [
        ("vllm serve m --max-num-seqs 64", "vllm serve m --max-num-seqs 6"),
        ("vllm serve m --max-num-seqs=64 -O3", "vllm serve m --max-num-seqs 6 -O3"),
        ("vllm serve m --max_num_seqs 64 --x", "vllm serve m --max-num-seqs 6 --x"),
        ("vllm serve m --max-num-seqs 8 --port 1 --max-num-seqs 9", "vllm serve m --max-num-seqs 6 --port 1"),
        ("RANK=1 vllm serve 'my model'", "RANK=1 vllm serve 'my model' --max-num-seqs 6"),
        ("VLLM_CPU_OMP_THREADS_BIND='0|1' vllm serve m",
         "VLLM_CPU_OMP_THREADS_BIND='0|1' vllm serve m --max-num-seqs 6"),
        ("VLLM_CPU_OMP_THREADS_BIND=0-1|2,3 vllm serve m",
         "VLLM_CPU_OMP_THREADS_BIND='0-1|2,3' vllm serve m --max-num-seqs 6"),
        ("sh -c 'exec vllm serve m -q fp8'", "sh -c 'exec vllm serve m -q fp8 --max-num-seqs 6'"),
        ('bash -c "vllm serve m --seed 1"', "bash -c 'vllm serve m --seed 1 --max-num-seqs 6'"),
        ('vllm serve "$MODEL" --tensor-parallel-size $(nvidia-smi -L | wc -l) 2>&1 | tee log',
         'vllm serve "$MODEL" --tensor-parallel-size "${TENSOR_PARALLEL_SIZE:?}" --max-num-seqs 6'),
        ("docker run -p 1:1 vllm/vllm-openai bash -c 'vllm serve m --max-num-seqs 9 --port 1'",
         "docker run -p 1:1 vllm/vllm-openai bash -c 'vllm serve m --max-num-seqs 6 --port 1'"),
        ("vllm serve m --chat-template ~/t.jinja", "vllm serve m --chat-template ~/t.jinja --max-num-seqs 6"),
        ('vllm serve m "$@"', 'vllm serve m "$@" --max-num-seqs 6'),
        ("vllm serve m $EXTRA_ARGS", "vllm serve m $EXTRA_ARGS --max-num-seqs 6"),
        ("if true; then vllm serve m; fi", "vllm serve m --max-num-seqs 6"),
        ("cd /models && vllm serve ./m > log &", "vllm serve ./m --max-num-seqs 6"),
        ("#!/bin/sh\nexport RANK=1\nvllm serve m \\\n  --port 1\n", "RANK=1 vllm serve m --port 1 --max-num-seqs 6"),
        ("vllm serve m &\nvllm serve n", None),
        # other commands are left out: what they are given may be a secret that nothing tells from a word
        ("vllm serve m &\nwait", "vllm serve m --max-num-seqs 6"),
        ("mysql -pSECRET; vllm serve m", "vllm serve m --max-num-seqs 6"),
        ("sh -c 'mysql -pSECRET; vllm serve m'", "sh -c 'vllm serve m --max-num-seqs 6'"),
        ("export VLLM_API_KEY=REDACTED; vllm serve m",
         'VLLM_API_KEY="${VLLM_API_KEY:?}" vllm serve m --max-num-seqs 6'),
        ("docker run --env=HF_TOKEN=REDACTED -eA_KEY=REDACTED vllm/vllm-openai --model m",
         'docker run --env=HF_TOKEN="${HF_TOKEN:?}" -eA_KEY="${A_KEY:?}" vllm/vllm-openai --model m --max-num-seqs 6'),
        ("vllm serve m --api-key REDACTED", 'vllm serve m --api-key "${VLLM_API_KEY:?}" --max-num-seqs 6'),
        ("HF_TOKEN=REDACTED vllm serve m --ssl-keyfile=REDACTED",
         'HF_TOKEN="${HF_TOKEN:?}" vllm serve m --ssl-keyfile="${SSL_KEYFILE:?}" --max-num-seqs 6'),
        ("vllm serve 'open quote", None),
        ("sleep 3", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_flag_is_replaced_in_any_of_its_spellings(launch: str, line: str | None) -> None:
    assert changed(launch, FlagChange("--max-num-seqs", None, 6.0)) == line


@pytest.mark.parametrize(
    ("launch", "change", "line"),
    [
        ("vllm serve m --num-gpu-blocks-override 128 --port 1", ("--num-gpu-blocks-override", None),
         "vllm serve m --port 1"),
        ("vllm serve m --no-enable-prefix-caching", ("--enable-prefix-caching", ""),
         "vllm serve m --enable-prefix-caching"),
        ("vllm serve m -cc.cudagraph_mode=NONE -O3", ("--compilation-config.cudagraph_mode", "PIECEWISE"),
         "vllm serve m --compilation-config.cudagraph_mode PIECEWISE -O3"),
        ("vllm serve m -cc.mode=3", ("--compilation-config.cudagraph_mode", "NONE"),
         "vllm serve m -cc.mode=3 --compilation-config.cudagraph_mode NONE"),
        ("RANK=1 vllm serve m", ("NCCL_P2P_DISABLE", "1"), "NCCL_P2P_DISABLE=1 RANK=1 vllm serve m"),
        ("NCCL_P2P_DISABLE=0 vllm serve m", ("NCCL_P2P_DISABLE", "1"), "NCCL_P2P_DISABLE=1 vllm serve m"),
        ("sh -c 'vllm serve m'", ("NCCL_P2P_DISABLE", "1"), "sh -c 'NCCL_P2P_DISABLE=1 vllm serve m'"),
        ("vllm serve m", ("VLLM_ENGINE_READY_TIMEOUT_S", 2598.0), "VLLM_ENGINE_READY_TIMEOUT_S=2598 vllm serve m"),
        ("docker run --rm vllm/vllm-openai --model m", ("NCCL_P2P_DISABLE", "1"),
         "docker run --rm -e NCCL_P2P_DISABLE=1 vllm/vllm-openai --model m"),
        ("docker run -eNCCL_P2P_DISABLE=0 vllm/vllm-openai --model m", ("NCCL_P2P_DISABLE", "1"),
         "docker run -eNCCL_P2P_DISABLE=1 vllm/vllm-openai --model m"),
        ("docker run --env=NCCL_P2P_DISABLE=0 vllm/vllm-openai --model m", ("NCCL_P2P_DISABLE", "1"),
         "docker run --env=NCCL_P2P_DISABLE=1 vllm/vllm-openai --model m"),
        ("sudo -u vllm vllm serve m", ("NCCL_P2P_DISABLE", "1"), None),
        ("--model m --max-num-seqs 6", ("NCCL_P2P_DISABLE", "1"), None),
        ("""vllm serve m -cc '{"mode": 3}' --port 1""", ("--compilation-config.cudagraph_mode", "PIECEWISE"),
         """vllm serve m --compilation-config '{"mode": 3, "cudagraph_mode": "PIECEWISE"}' --port 1"""),
        ("vllm serve m --compilation-config 3", ("--compilation-config.cudagraph_mode", "PIECEWISE"), None),
        ("vllm serve m --spec-method ngram --port 1 --spec-tokens 5", ("--speculative-config", None),
         "vllm serve m --port 1"),
        ("vllm serve m -sc.method ngram --speculative-config.num_speculative_tokens=5",
         ("--speculative-config", None), "vllm serve m"),
        ("vllm serve m --config c.yaml", ("--num-gpu-blocks-override", None), None),
    ],
)  # fmt: skip
def test_removals_switches_keys_and_variables(launch: str, change: tuple[str, Any], line: str | None) -> None:
    assert changed(launch, FlagChange(change[0], None, change[1])) == line


def test_a_proposal_that_would_not_move_the_value_is_left_out(tmp_path: Path) -> None:
    alone = str(pages_alone(tmp_path, "queue_saturation"))
    finding = doctor.run(ObserveOptions([alone], launch="vllm serve m --max-num-seqs 100000")).present[0]
    assert "--max-num-seqs" not in [each.fix.flag for each in finding.proposals]


def test_the_relaunch_line_carries_the_first_proposal_that_lacks_nothing() -> None:
    lacking = Proposal(fix(), None, None, ("more",), False, "", changes=(FlagChange("--port", None, 1.0),))
    advice = Proposal(fix(), None, None, (), False, "")
    ready = Proposal(fix(), None, None, (), False, "", changes=(FlagChange("--seed", None, 2.0),))
    assert relaunch("vllm serve m", [lacking, advice, ready]) == "vllm serve m --seed 2"
    assert relaunch("vllm serve m", [lacking, advice]) is None


def test_prompts_that_are_prefilled_together_share_the_freeze_limit() -> None:
    """In chunks they last longer and meet: 1.7 at a time here, some of them short ones that wait for a long one."""
    seen = read(Path("tests") / "recordings" / "contention_bigbatch")
    asked = QueryCache(seen, Contract())
    together = "sum by (instance) (rate(vllm:request_prefill_time_seconds_sum[$window]))"
    one, step, prefills = (
        next(iter(asked.ask(promql, ("instance",), asked.whole).values()))[-1]
        for promql in (tokens_of_one_prompt_within_pause.promql, tokens_prefilled_within_pause.promql, together)
    )
    assert prefills > 1
    assert one == pytest.approx(step / (1 + prefills))


@pytest.mark.parametrize(
    "told", [{"flag": "--max-num-sequences"}, {"flag": "max-num-seqs"}, {"also": (("--max-num-sequences", NOTHING),)}]
)
def test_a_flag_that_no_release_has_is_refused_in_a_declaration(told: dict[str, Any]) -> None:
    cascade = next(each for each in load() if each.id == "kv_eviction_cascade")
    with pytest.raises(ValueError, match="no vLLM release has the flag"):
        _check_alone(cascade._replace(fixes=(fix(**told),)), Path("kv_eviction_cascade.py"))


def flags(folder: Path, recording: str, launch: str, change: Callable[[str], str] = str) -> dict[str, Any]:
    """The flags that are proposed for the changed pages of a recording, with this launch command."""
    pages = rewriting.changed(rewriting.scrapes(recording), lambda page: change(SAID.sub("", page)))
    found = doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", pages))], launch=launch)).present[0]
    return {each.fix.flag: each.after for each in found.proposals if each.fix.flag}


SAID = re.compile(r"^diag_vllm_config.*\n", re.MULTILINE)


@pytest.mark.parametrize(
    ("running", "cap", "proposed"), [(64, 64, True), (64, 5, False), (5, 64, False), (6, 64, False)]
)
def test_cap_of_active_requests_is_proposed_only_if_requests_reach_it(
    tmp_path: Path, running: float, cap: int, proposed: bool
) -> None:
    """The pool holds 6; vLLM refuses fewer sequences than active ones."""
    line = re.compile(r"^(vllm:num_requests_running\S*) (\S+)$", re.MULTILINE)

    def capped(page: str) -> str:
        return line.sub(lambda found: f"{found[1]} {min(running, float(found[2]))}", page)

    found = flags(tmp_path, "kv_cascade", f"vllm serve m --max-num-seqs {cap}", capped)
    assert found.get("--max-num-active-seqs") == (6 if proposed else None)
    assert "--num-gpu-blocks-override" in found  # the cascade is there


@pytest.mark.parametrize(
    ("caps", "proposed"),
    [
        ("--max-num-seqs 64 --max-num-active-seqs 4", {"--max-num-active-seqs": 32}),
        ("--max-num-seqs 8 --max-num-active-seqs 4", {"--max-num-active-seqs": 8}),
        ("--max-num-seqs 4", {"--max-num-seqs": 32}),
    ],
)
def test_the_cap_that_binds_is_the_one_that_is_raised(tmp_path: Path, caps: str, proposed: dict[str, Any]) -> None:
    assert flags(tmp_path, "queue_saturation", f"vllm serve m --max-num-batched-tokens 2048 {caps}") == proposed


@pytest.mark.parametrize(("budget", "proposed"), [(256, False), (512, True)])
def test_a_threshold_that_a_step_never_reaches_is_not_proposed(tmp_path: Path, budget: int, proposed: bool) -> None:
    found = flags(tmp_path, "contention_bigbatch", f"vllm serve m --max-num-batched-tokens {budget}")
    assert ("--long-prefill-token-threshold" in found) is proposed


def test_the_requests_through_the_gateway_are_those_of_one_engine() -> None:
    assert "Limit gateway concurrency to 6 per engine" in primary("kv_cascade").proposals[0].text


def test_prompts_that_share_their_beginning_leave_room_for_others(tmp_path: Path) -> None:
    """Prompts 75 times as long, of which 0.97 is in the cache: four run in 0.6 of the pool."""
    line = re.compile(
        r"^(vllm:(request_prompt_tokens_sum|prefix_cache_(?:queries|hits)_total|kv_cache_usage_perc)\S*) (\S+)$", re.M
    )
    factors = {"request_prompt_tokens_sum": 75.0, "prefix_cache_queries_total": 75.0}

    def shared(page: str) -> str:
        queries = next((float(one[3]) for one in line.finditer(page) if "queries" in one[2]), 0.0) * 75
        told = {"prefix_cache_hits_total": 0.97 * queries, "kv_cache_usage_perc": 0.6}
        return line.sub(lambda one: f"{one[1]} {told.get(one[2], float(one[3]) * factors.get(one[2], 1.0))}", page)

    found = flags(tmp_path, "queue_saturation", "vllm serve m --max-num-seqs 4", shared)
    assert found["--max-num-seqs"] == 6  # 0.9 / 0.6 of those that run


def test_a_shell_still_fills_in_homes_and_arguments() -> None:
    assert line_of(["vllm", "serve", "~/my model", "$@", "--x=~/t.jinja"]) == (
        """vllm serve ~/'my model' "$@" --x=~/t.jinja"""
    )
