"""vLLM's metrics by release: what the installed source names, what recorded pages have, and how a release is added."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.live import server
from support.paths import RECORDINGS, ROOT, TESTS

from diag.core.declarations import PACKAGE
from diag.core.metric_prefix import in_any_release, metric
from diag.knowledge.signals import DECLARED
from diag.vllm import metric_names
from diag.vllm.flags.registry import described, environment, release
from diag.vllm.metric_names import exported_by

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
    for file in PACKAGE.rglob("*.py"):
        names = re.findall(r"""\bmetric\(f?["'](\w+)""", file.read_text(encoding="utf-8"))
        texts += [" ".join(map(metric, names))]
    read = {
        metric_names.SUFFIX.sub("", name) for text in texts for name in re.findall(r"vllm:\w+", in_any_release(text))
    }
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


def test_a_name_in_code_is_one_that_a_release_exports() -> None:
    """`metric("name")`; the names in PromQL are tested by their samples."""
    for file in PACKAGE.rglob("*.py"):
        for name in re.findall(r"""\bmetric\(["'](\w+)["']\)""", file.read_text(encoding="utf-8")):
            assert metric_names.SUFFIX.sub("", metric(name)) in metric_names.known(), (file, name)


RENAMED = {"num_requests_running": "requests_in_batch", "num_requests_waiting": "requests_queued"}
"""Two metrics that a release might rename: one tells a page of vLLM from others, one decides most verdicts."""


@pytest.mark.slow
def test_a_renamed_metric_is_one_line_in_one_file(tmp_path: Path) -> None:
    for source in (ROOT / "diag").rglob("*"):
        if source.is_file() and "__pycache__" not in source.parts:
            (target := tmp_path / source.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)
    table = tmp_path / "diag/core/vllm_metrics.toml"
    text = table.read_text(encoding="utf-8")
    table.unlink()
    table.write_text(text + "".join(f'{name} = ["{new}"]\n' for name, new in RENAMED.items()), encoding="utf-8")

    answers = []
    for package, names, prefix in ((ROOT, {}, ""), (tmp_path, RENAMED, ""), (tmp_path, RENAMED, "ray_")):
        recording = tmp_path / f"of{len(answers)}" / "kv_cascade"
        shutil.copytree(RECORDINGS / "kv_cascade", recording)
        pages = gzip.decompress((recording / "metrics.prom.gz").read_bytes()).decode()
        for name, new in names.items():
            pages = re.sub(rf"\bvllm:{name}(?=[ {{])", f"vllm:{new}", pages)
        (recording / "metrics.prom.gz").write_bytes(gzip.compress(pages.replace("vllm:", f"{prefix}vllm:").encode(), 1))
        done = subprocess.run(
            [sys.executable, "-m", "diag", "doctor", "--json", "kv_cascade"],
            cwd=recording.parent,
            env={**os.environ, "PYTHONPATH": str(package)},
            capture_output=True,
            check=False,
        )
        document = json.loads(done.stdout)
        answers.append((done.returncode, document["diagnoses"], document["verdict"]))
    assert answers[0][1]
    assert answers[1] == answers[0]
    assert [diagnosis["incident"] for diagnosis in answers[2][1]][:1] == [answers[0][1][0]["incident"]]


@pytest.mark.parametrize(
    ("metrics", "ends"),
    [
        ({"vllm:time_per_output_token_seconds_bucket", "vllm:inter_token_latency_seconds_sum"}, ("0.10.2", "0.14.1")),
        ({"vllm:admission_rejections_total", "vllm:kv_cache_usage_perc", "up"}, ("0.32.0", "")),
        ({"vllm:gpu_cache_usage_perc", "vllm:admission_rejections_total"}, ("", "")),  # a gateway renames some
        (set[str](), ("", "")),
    ],
)
def test_the_metrics_of_a_page_bound_its_release(metrics: set[str], ends: tuple[str, str]) -> None:
    assert exported_by(metrics) == ends
