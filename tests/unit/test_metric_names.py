"""vLLM's metrics by release: what the installed source names, what recorded pages have, and how a release is added."""

import gzip
import re
from pathlib import Path

import pytest
from support.live import server
from support.paths import TESTS

from diag.vllm import metric_names
from diag.vllm.flags.registry import described, environment, release

FIRST_PAGE = 200_000
"""Characters that hold the first page of a recording."""


@pytest.mark.live
@server.needed
@pytest.mark.parametrize("names", [metric_names.METRICS, metric_names.VARIABLES], ids=["metrics", "variables"])
def test_every_name_of_the_installed_source_is_known_and_no_other(names: metric_names.Names) -> None:
    package = next(Path(server.PYTHON).parent.parent.glob("lib/python3*/site-packages/vllm"))
    at = release(described())
    known = {
        name
        for name, (first, last) in metric_names.with_release(set(), described(), names).items()
        if release(first) <= at <= release(last)
    }
    assert metric_names.in_source(package, names) == known


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
