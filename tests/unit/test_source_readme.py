"""The example source in diag/sources/README.md is complete: it judges the pages of a recording as diag does."""

import re
from pathlib import Path

from support.paths import RECORDINGS, ROOT

from diag.commands.observe import judge_observation, site
from diag.diagnosis.report import Report
from diag.exposition.scrapes import Target
from diag.sources.observation import Observation, Origin, observation
from diag.sources.recording.reader import read, read_pages
from diag.vllm.running_config import ServerFacts


def test_example_source_of_the_readme_gives_the_verdict_of_the_recording(tmp_path: Path) -> None:
    text = (ROOT / "diag/sources/README.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example
    names = {each.__name__: each for each in (Target, Observation, Origin, observation, ServerFacts, Path)}
    exec(example[1], names)
    ((instance, scrapes),) = read_pages(RECORDINGS / "lora_thrash").scrapes.items()
    (tmp_path / instance).mkdir()
    for scrape in scrapes:
        (tmp_path / instance / f"{scrape.at}.prom").write_bytes(scrape.page)
    found, expected = (
        judge_observation(observed, *site(None, None)).report
        for observed in (names["read_folder"](tmp_path / instance), read(RECORDINGS / "lora_thrash"))
    )
    assert found.verdict == expected.verdict == "warning"
    assert _states(found) == _states(expected)


def _states(report: Report) -> dict[str, str]:
    return {finding.diagnosis.incident.id: finding.diagnosis.state for finding in report.findings}
