"""Prefix caching of hybrid models, whose blocks are enlarged: without effect where prompts share less than a block."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support import rewriting as re
from support.paths import RECORDINGS
from support.sampling import sampled
from support.thinning import CADENCES, thinned

from diag.commands import doctor
from diag.commands.observe import ObserveOptions, judge_observation, site
from diag.diagnosis.report import Finding, Report
from diag.report.sentences import also
from diag.sources.recording.reader import read

INCIDENT, BLOCKS = "prefix_cache_ineffective", "prefix_hybrid_blocks"
LENGTHS = "vllm:request_prompt_tokens_sum{"
LINE = (
    "(Worker pid=7) INFO 11-26 08:14:14 [interface.py:1096] Setting attention block size to 544 tokens to ensure that"
)


def judged(folder: Path, change: Callable[[str], str] = str, log: str = "", launch: str = "") -> Report:
    recording = re.write(folder / "recording", re.changed(re.scrapes(BLOCKS), change))
    if log:
        (recording / "server.log").write_text(f"{log} attention page size is >= mamba page size.\n", encoding="utf-8")
    return doctor.run(ObserveOptions([str(recording)], launch=launch))


def found(report: Report) -> Finding:
    (finding,) = (each for each in report.findings if each.diagnosis.incident.id == INCIDENT)
    return finding


def proposed(report: Report) -> list[object]:
    """Return the new values of all proposals."""
    return [proposal.after for proposal in found(report).proposals]


def test_prefixes_shorter_than_a_block_are_reported_with_the_block(tmp_path: Path) -> None:
    report = judged(tmp_path)
    assert report.verdict == "healthy"
    (line,) = also(report)
    assert "prefix cache hit rate: 0 %; each prefix cache hit is a multiple of 544 tokens" in line
    assert "a prompt spans 1.03 KV blocks on average" in line
    flag, longer, _ = found(report).proposals
    assert (flag.name, flag.after, longer.after) == ("--prefix-match-unit", 16, 544)


@sampled("every", CADENCES, 2)
def test_prefixes_shorter_than_a_block_are_found_at_every_cadence(every: float) -> None:
    report = judge_observation(thinned(read(RECORDINGS / BLOCKS), every, 0), *site(None, None)).report
    assert found(report).diagnosis.state == "present"


def test_the_log_names_the_blocks_of_releases_that_export_the_old_size(tmp_path: Path) -> None:
    """vllm#42966: the page says 16."""

    def stale(page: str) -> str:
        return page.replace('block_size="544"', 'block_size="16"').replace('block_size"} 544', 'block_size"} 16')

    assert proposed(judged(tmp_path / "page", stale)) == [None]
    assert proposed(judged(tmp_path / "log", stale, LINE)) == [16, 544, None]


def test_unique_prompts_of_a_dense_model_are_not_blamed_on_blocks() -> None:
    report = doctor.run(ObserveOptions([str(RECORDINGS / "prefix_unique")]))
    assert (found(report).diagnosis.state, proposed(report)) == ("present", [None])


@pytest.mark.parametrize(
    "change",
    [
        lambda page: page.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"'),
        lambda page: re.with_value(page, LENGTHS, str(0.1 * float(page.partition(LENGTHS)[2].split()[1]))),
    ],
    ids=["caching is off", "prompts of 56 tokens"],
)
def test_a_hybrid_model_without_prefixes_worth_sharing_is_no_incident(
    tmp_path: Path, change: Callable[[str], str]
) -> None:
    assert found(judged(tmp_path, change)).diagnosis.state == "absent"
