"""vLLM's metrics by release: what the installed source names, what recorded pages have, and how a release is added."""

import gzip
import re
from pathlib import Path

import pytest
from support.live import server
from support.paths import TESTS

from diag.core.declarations import PACKAGE
from diag.knowledge.signals import DECLARED
from diag.vllm import metric_names
from diag.vllm.flags.registry import described, environment, release

FIRST_PAGE = 200_000
"""Characters that hold the first page of a recording."""


def known(version: str, names: metric_names.Names) -> set[str]:
    """Return the names that the table has for a release."""
    at = release(version)
    rows = metric_names.with_release(set(), described(), names).items()
    return {name for name, (first, last) in rows if release(first) <= at <= release(last)}


@pytest.mark.live
@server.needed
@pytest.mark.parametrize("names", [metric_names.METRICS, metric_names.VARIABLES], ids=["metrics", "variables"])
def test_every_name_of_the_sources_is_known_and_no_other(names: metric_names.Names) -> None:
    for version, package in server.sources().items():
        assert metric_names.in_source(package, names) == known(version, names), version


def test_every_metric_of_the_newest_release_is_read_or_says_why_not() -> None:
    texts = [text for of in DECLARED.values() for text in (of.promql, getattr(of, "culprit_promql", ""))]
    texts += [file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")]
    read = {metric_names.SUFFIX.sub("", name) for text in texts for name in re.findall(r"vllm:\w+", text)}
    newest = {metric_names.SUFFIX.sub("", name) for name in known(metric_names.newest(), metric_names.METRICS)}
    assert {name for name in newest if bool(metric_names.why_unread(name)) == (name in read)} == set()
    named = [name.removeprefix("vllm:") for name in newest]
    for pattern in metric_names.unread():
        assert any(re.fullmatch(pattern, name) for name in named), pattern


def test_every_metric_of_recorded_pages_is_known() -> None:
    families: set[str] = set()
    for file in (TESTS / "recordings").glob("*/metrics.prom.gz"):
        with gzip.open(file, "rt", encoding="utf-8") as pages:
            families.update(re.findall(r"^(vllm:\w+)\{", pages.read(FIRST_PAGE), re.MULTILINE))
    assert len(families) > 50
    assert {name for name in families if metric_names.SUFFIX.sub("", name) not in metric_names.known()} == set()


def test_every_variable_that_the_described_parser_names_is_read_by_its_release() -> None:
    names = [name for name in environment() if name.startswith("VLLM_")]
    assert len(names) > 200
    assert [name for name in names if not metric_names.reads(described(), name)] == []


def test_a_release_is_added(tmp_path: Path) -> None:
    (tmp_path / "metrics.py").write_text('NEW = "vllm:never_seen"\nprefix = "vllm:spec_decode"\n')
    (tmp_path / "envs.py").write_text('x = {\n    "VLLM_NEVER": 1,\n}\nos.getenv("VLLM_SEEN")\nlog("VLLM_SAID")\n')
    for names, found in (
        (metric_names.METRICS, {"vllm:never_seen"}),
        (metric_names.VARIABLES, {"VLLM_NEVER", "VLLM_SEEN"}),
    ):
        assert metric_names.in_source(tmp_path, names) == found
        content = metric_names.with_release(found, "0.99.0", names)
        assert {content[name] for name in found} == {("0.99.0", "0.99.0")}
        assert metric_names.written(metric_names.with_release(set(), "0.99.0", names), names) == names.file.read_text()
