"""A fix becomes a concrete value, from this server's numbers, for this server's release, or says what it needs."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rewriting import pages_alone

from diag import doctor
from diag.asking import Asked
from diag.catalog import _check_fix, load
from diag.contract import Contract
from diag.diagnose import diagnose
from diag.fixes import Change, Proposal, Running, available, propose
from diag.incident import Fix, Signal, judged
from diag.judgement import Finding
from diag.relaunch import relaunch
from diag.signals import running_value, tokens_of_one_prompt_in_a_freeze, tokens_prefilled_in_a_freeze
from diag.sources.answers import SampleAnswers
from diag.sources.recording import read


def primary(recording: str, launch: str = "") -> Finding:
    return doctor.run(doctor.Settings([str(Path("tests") / "recordings" / recording)], launch=launch)).present[0]


def proposed(finding: Finding, flag: str) -> Proposal:
    return next(each for each in finding.proposals if each.fix.flag == flag)


@pytest.mark.parametrize("recording", ["kv_cascade", "kv_cascade_base"])
def test_the_cap_is_what_the_pool_holds_at_the_mean_length(recording: str) -> None:
    fix = proposed(primary(recording), "--max-num-active-seqs")
    assert (fix.before, fix.after) == (None, 6)  # 4,096 tokens x 0.9 / 620 a request; 6 is what was measured to cure it


def test_the_long_prefill_threshold_comes_from_the_measured_prefill_rate() -> None:
    assert proposed(primary("contention_bigbatch"), "--long-prefill-token-threshold").after == 256


def test_a_cap_is_raised_to_the_requests_that_came() -> None:
    fix = proposed(primary("queue_saturation"), "--max-num-seqs")
    assert (fix.before, fix.after) == (4, 24)  # 24 clients, and room for 161 of their requests in the pool


def test_a_cap_is_raised_no_higher_than_the_pool_holds() -> None:
    fix = proposed(primary("cure_max_num_seqs_p90"), "--max-num-seqs")
    assert (fix.before, fix.after) == (3, 6)  # 28 clients, room for 6


def test_capacity_comes_before_the_cap_and_the_cap_before_the_watermark() -> None:
    flags = [each.fix.flag for each in primary("kv_cascade").proposals]
    assert flags.index("--num-gpu-blocks-override") < flags.index("--max-num-active-seqs") < flags.index("--watermark")


def test_what_needs_no_restart_comes_first_in_a_cascade_and_in_a_contention() -> None:
    first = primary("kv_cascade").proposals[0]
    assert (first.fix.restart, first.after) == (False, 6)
    assert "no more than 6 requests at a time" in first.text
    first = primary("contention_bigbatch").proposals[0]
    assert (first.fix.restart, first.after) == (False, 256)


def test_a_fix_that_needs_what_was_not_measured_says_so() -> None:
    assert proposed(primary("kv_cascade"), "--kv-cache-dtype").needs


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
def asked() -> Asked:
    seen = read(CASCADE)
    return Asked(SampleAnswers(seen.samples, seen.instants, seen.interval), Contract())


def number(value: float) -> Signal:
    """A signal that is this number on every server."""
    return Signal(f"number {value:g}", f"{value} + 0 * max by (instance) (last_over_time(up[$window]))", "{value}")


NOTHING = Signal("nothing", "max by (instance) (last_over_time(not_there[$window]))", "{value}")


def fix(**told: Any) -> Fix:
    return Fix(**{"change": "Do {value}.", "effect": "it helps", "why": judged("a test"), **told})


def proposals(*fixes: Fix, version: str = "0.32.0", whole: bool = True) -> tuple[Proposal, ...]:
    """What is proposed for the recorded cascade where these are its fixes."""
    incident = replace(next(each for each in load() if each.id == "kv_eviction_cascade"), fixes=fixes)
    diagnosis = next(each for each in diagnose([incident], asked()) if each.state == "present")
    return propose(diagnosis, asked(), Running(version, LAUNCH, whole))


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
def test_a_proposal_is_never_worse_than_what_runs(direction: str, value: float, proposed: bool) -> None:
    assert bool(proposals(fix(flag="--max-num-seqs", value=number(value), direction=direction))) is proposed


def test_what_no_source_tells_runs_at_the_default_of_its_release() -> None:
    """A watermark is on no page, and not in the launch command."""
    (only,) = proposals(fix(flag="--watermark", value=0.05, direction="raise"))
    assert (only.before, only.assumed, only.needs) == (0.0, True, ())
    assert only.changes == (Change("--watermark", 0.0, 0.05, assumed=True),)
    assert not proposals(fix(flag="--watermark", value=0.0, direction="raise"))


def test_a_direction_from_a_value_that_nobody_knows_is_a_need() -> None:
    """A threshold is 0 in every release; nothing tells how many log probabilities are allowed."""
    (only,) = proposals(fix(flag="--long-prefill-token-threshold", value=256, direction="lower"), version="")
    assert only.needs == ()
    (only,) = proposals(fix(flag="--max-logprobs", value=9, direction="lower"))
    assert only.needs == ("the running --max-logprobs",)


@pytest.mark.parametrize(
    ("flag", "value"), [("--enforce-eager", 0), ("--stream-interval", 1), ("--kv-offloading-size", 0)]
)
def test_what_nobody_set_is_at_its_default_where_all_that_was_set_is_known(flag: str, value: float) -> None:
    """None of the three is on the recorded page."""
    signal = replace(running_value("not_on_the_page"), name=flag)
    holds, does_not = (fix(only_if=(signal.at_most(limit, judged("a test")),)) for limit in (value, value - 1))
    assert [each.needs for each in proposals(holds, does_not)] == [()]
    assert [each.needs for each in proposals(holds, does_not, whole=False)] == [(flag,), (flag,)]


def test_flags_that_go_together_change_together() -> None:
    halves = fix(flag="--pipeline-parallel-size", value=2.0, also=(("--tensor-parallel-size", number(2)),))
    (only,) = proposals(halves)
    assert relaunch("vllm serve m -tp 4 --port 1", [only]) == (
        "vllm serve m --tensor-parallel-size 2 --port 1 --pipeline-parallel-size 2"
    )
    (only,) = proposals(replace(halves, also=(("--tensor-parallel-size", NOTHING),)))
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


def changed(launch: str, *changes: Change) -> str | None:
    return relaunch(launch, [Proposal(fix(), None, None, (), False, "", changes=changes)])


@pytest.mark.parametrize(
    ("launch", "line"),
    [
        ("vllm serve m --max-num-seqs 64", "vllm serve m --max-num-seqs 6"),
        ("vllm serve m --max-num-seqs=64 -O3", "vllm serve m --max-num-seqs 6 -O3"),
        ("vllm serve m --max_num_seqs 64 --x", "vllm serve m --max-num-seqs 6 --x"),
        ("vllm serve m --max-num-seqs 8 --port 1 --max-num-seqs 9", "vllm serve m --max-num-seqs 6 --port 1"),
        ("A=1 vllm serve 'my model'", "A=1 vllm serve 'my model' --max-num-seqs 6"),
        ("BIND='0|1' vllm serve m", "BIND='0|1' vllm serve m --max-num-seqs 6"),
        ("BIND=0-1|2,3 vllm serve m", "BIND='0-1|2,3' vllm serve m --max-num-seqs 6"),
        ("sh -c 'exec vllm serve m -q fp8'", "exec vllm serve m -q fp8 --max-num-seqs 6"),
        ('vllm serve "$MODEL" --tensor-parallel-size $(nvidia-smi -L | wc -l) 2>&1 | tee log',
         'vllm serve "$MODEL" --tensor-parallel-size "$(nvidia-smi -L | wc -l)" --max-num-seqs 6'),
        ("vllm serve m --api-key REDACTED", 'vllm serve m --api-key "$VLLM_API_KEY" --max-num-seqs 6'),
        ("HF_TOKEN=REDACTED vllm serve m --ssl-keyfile=REDACTED",
         'HF_TOKEN="$HF_TOKEN" vllm serve m --ssl-keyfile="$SSL_KEYFILE" --max-num-seqs 6'),
        ("vllm serve 'open quote", None),
        ("sleep 3", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_flag_is_replaced_in_any_of_its_spellings(launch: str, line: str | None) -> None:
    assert changed(launch, Change("--max-num-seqs", None, 6.0)) == line


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
        ("A=1 vllm serve m", ("NCCL_P2P_DISABLE", "1"), "NCCL_P2P_DISABLE=1 A=1 vllm serve m"),
        ("NCCL_P2P_DISABLE=0 vllm serve m", ("NCCL_P2P_DISABLE", "1"), "NCCL_P2P_DISABLE=1 vllm serve m"),
    ],
)  # fmt: skip
def test_removals_switches_keys_and_variables(launch: str, change: tuple[str, Any], line: str) -> None:
    assert changed(launch, Change(change[0], None, change[1])) == line


def test_a_proposal_that_would_not_move_the_value_is_left_out(tmp_path: Path) -> None:
    alone = str(pages_alone(tmp_path, "queue_saturation"))
    finding = doctor.run(doctor.Settings([alone], launch="vllm serve m --max-num-seqs 100000")).present[0]
    assert "--max-num-seqs" not in [each.fix.flag for each in finding.proposals]


def test_the_relaunch_line_carries_the_first_proposal_that_lacks_nothing() -> None:
    lacking = Proposal(fix(), None, None, ("more",), False, "", changes=(Change("--port", None, 1.0),))
    advice = Proposal(fix(), None, None, (), False, "")
    ready = Proposal(fix(), None, None, (), False, "", changes=(Change("--seed", None, 2.0),))
    assert relaunch("vllm serve m", [lacking, advice, ready]) == "vllm serve m --seed 2"
    assert relaunch("vllm serve m", [lacking, advice]) is None


def test_prompts_that_are_prefilled_together_share_the_freeze_limit() -> None:
    """In chunks they last longer and meet: 1.7 at a time here, some of them short ones that wait for a long one."""
    seen = read(Path("tests") / "recordings" / "contention_bigbatch")
    asked = Asked(SampleAnswers(seen.samples, seen.instants, seen.interval), Contract())
    together = "sum by (instance) (rate(vllm:request_prefill_time_seconds_sum[$window]))"
    one, step, prefills = (
        next(iter(asked.ask(promql, ("instance",), asked.whole).values()))[-1]
        for promql in (tokens_of_one_prompt_in_a_freeze.promql, tokens_prefilled_in_a_freeze.promql, together)
    )
    assert prefills > 1
    assert one == pytest.approx(step / (1 + prefills))


@pytest.mark.parametrize(
    "told", [{"flag": "--max-num-sequences"}, {"flag": "max-num-seqs"}, {"also": (("--max-num-sequences", NOTHING),)}]
)
def test_a_flag_that_no_release_has_is_refused_in_a_declaration(told: dict[str, Any]) -> None:
    cascade = next(each for each in load() if each.id == "kv_eviction_cascade")
    with pytest.raises(ValueError, match="no vLLM release has the flag"):
        _check_fix(fix(**told), cascade)
