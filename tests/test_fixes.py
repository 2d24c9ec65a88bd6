"""A fix becomes a concrete value, from this server's numbers, for this server's release, or says what it needs."""

from pathlib import Path

import pytest
from rewriting import pages_alone

from diag import doctor
from diag.fixes import Proposal, available, relaunch
from diag.incident import Fix, judged
from diag.judgement import Finding


def primary(recording: str, launch: str = "") -> Finding:
    return doctor.run(doctor.Settings([str(Path("tests") / "recordings" / recording)], launch=launch)).present[0]


def proposed(finding: Finding, flag: str) -> Proposal:
    return next(each for each in finding.proposals if each.fix.flag == flag)


@pytest.mark.parametrize("recording", ["kv_cascade", "kv_cascade_base"])
def test_max_num_seqs_is_what_the_pool_holds_at_the_mean_length(recording: str) -> None:
    fix = proposed(primary(recording), "--max-num-seqs")
    assert (fix.before, fix.after) == (64, 6)  # 4,096 tokens x 0.9 / 620 a request; 6 is what was measured to cure it


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
    assert flags.index("--num-gpu-blocks-override") < flags.index("--max-num-seqs") < flags.index("--watermark")


def test_a_fix_that_needs_what_was_not_measured_says_so() -> None:
    assert proposed(primary("kv_cascade"), "--kv-cache-dtype").needs
    assert proposed(primary("kv_cascade"), "--gpu-memory-utilization").needs


def test_a_watermark_that_is_set_already_is_not_proposed_again() -> None:
    assert "--watermark" not in [each.fix.flag for each in primary("cure_watermark").proposals]


def test_a_flag_that_the_release_lacks_is_not_proposed() -> None:
    assert not available(("0.24.0", ""), "0.11.2")
    assert not available(("0.7.3", "0.26.0"), "0.32.0")
    assert available(("0.24.0", ""), "0.24.0")
    assert available(("0.24.0", ""), "")
    assert available(("0.24.0", ""), "0.24")
    assert available(("0.24.0", ""), "v0.33.0rc1+cpu")


def test_the_relaunch_line_is_the_launch_command_with_the_first_complete_flag() -> None:
    line = primary("kv_cascade").relaunch
    assert line is not None
    assert "--num-gpu-blocks-override" not in line
    assert "--block-size 32" in line


def changed(flag: str, value: float | None, launch: str) -> str | None:
    fix = Fix(change="", effect="", why=judged("a test"), flag=flag, value=value)
    return relaunch(launch, [Proposal(fix, None, value, (), False, flag)])


@pytest.mark.parametrize(
    ("launch", "line"),
    [
        ("vllm serve m --max-num-seqs 64", "vllm serve m --max-num-seqs 6"),
        ("vllm serve m --max-num-seqs=64 -O3", "vllm serve m -O3 --max-num-seqs 6"),
        ("vllm serve m --max_num_seqs 64 --x", "vllm serve m --x --max-num-seqs 6"),
        ("A=1 vllm serve 'my model'", "A=1 vllm serve 'my model' --max-num-seqs 6"),
        ("BIND='0|1' vllm serve m", "BIND='0|1' vllm serve m --max-num-seqs 6"),
        ("vllm serve 'open quote", None),
        ("", None),
    ],
)
def test_a_flag_is_replaced_in_any_of_its_spellings(launch: str, line: str | None) -> None:
    assert changed("--max-num-seqs", 6.0, launch) == line


def test_a_flag_that_is_taken_away_takes_its_value_along() -> None:
    assert changed("--num-gpu-blocks-override", None, "vllm serve m --num-gpu-blocks-override 128 --x 1") == (
        "vllm serve m --x 1"
    )


def test_a_proposal_that_would_not_move_the_value_is_left_out(tmp_path: Path) -> None:
    alone = str(pages_alone(tmp_path, "queue_saturation"))
    finding = doctor.run(doctor.Settings([alone], launch="vllm serve m --max-num-seqs 100000")).present[0]
    assert "--max-num-seqs" not in [each.fix.flag for each in finding.proposals]
