"""diag.toml: what it sets is what doctor, alerts and dashboards use; what is wrong in it is refused with its place."""

from pathlib import Path

import pytest

from diag.core.contract import Contract, Site
from diag.core.contract_file import read
from diag.core.errors import BadContract
from diag.core.site_overrides import apply_overrides
from diag.knowledge.catalog import load

CASCADE = "kv_eviction_cascade"


def contract(folder: Path, text: str) -> Contract:
    (folder / "diag.toml").write_text(text, encoding="utf-8")
    return read(folder / "diag.toml")


def test_what_it_does_not_say_keeps_its_default(tmp_path: Path) -> None:
    read = contract(tmp_path, "[contract]\nttft_seconds = 2.5\n")
    assert read.values() == {**Contract().values(), "ttft_seconds": 2.5}
    assert f"ttft_seconds = 2.5 ({tmp_path}/diag.toml)" in read.lines()
    assert "itl_seconds = 2.5 (default)" in read.lines()


def test_a_site_names_its_labels_and_its_pages(tmp_path: Path) -> None:
    text = """
        [site]
        labels = ["cluster", "pod"]
        gpu_join = ["node"]
        runbook_base_url = "https://wiki.example/vllm/"
        grafana_url = "https://grafana.example"
    """
    assert contract(tmp_path, text).site == Site(
        ("cluster", "pod"), ("node",), "https://wiki.example/vllm", "https://grafana.example"
    )


def test_a_bucket_of_ones_own_may_be_promised(tmp_path: Path) -> None:
    assert contract(tmp_path, "[contract]\nttft_seconds = 3\nbuckets = [0.7, 3]\n").ttft_seconds == 3


def test_a_limit_of_ones_own_takes_the_place_of_ours_and_says_so(tmp_path: Path) -> None:
    read = contract(tmp_path, f'[limits.{CASCADE}]\n"preemptions / finished request" = 0.35\n')
    cascade = next(each for each in apply_overrides(load(), read) if each.id == CASCADE)
    first = cascade.symptoms[0]
    assert (first.limit, first.why.kind) == (0.35, "judged")
    assert "diag.toml, instead of 0.2" in first.why.says
    assert cascade.symptoms[1:] == next(each for each in load() if each.id == CASCADE).symptoms[1:]


def test_a_limit_also_moves_what_a_look_alike_is_told_apart_by(tmp_path: Path) -> None:
    read = contract(tmp_path, '[limits.gpu_thermal_throttling]\n"thermal slowdown (share of time)" = 0.1\n')
    hot = next(each for each in apply_overrides(load(), read) if each.id == "gpu_thermal_throttling")
    assert [each.refuted_by.limit for each in hot.looks_like if each.refuted_by] == [0.1]


def test_the_limit_that_escalates_has_a_name_of_its_own(tmp_path: Path) -> None:
    read = contract(tmp_path, '[limits.gpu_thermal_throttling]\nescalates = 0.3\n"SM clock below its maximum" = 0.1\n')
    hot = next(each for each in apply_overrides(load(), read) if each.id == "gpu_thermal_throttling")
    assert hot.escalates and hot.escalates.limit == 0.3
    assert next(each.limit for each in hot.supports if each.signal.name == "SM clock below its maximum") == 0.1


@pytest.mark.parametrize(
    ("text", "place", "sentence"),
    [
        ("[contrct]\n", ":1", "has no table 'contrct'"),
        ("[contract]\n\nfreze_seconds = 1\n", ":3", "[contract] has no entry 'freze_seconds'"),
        ("[contract]\nttft_seconds = 3\n", ":2", "ttft_seconds must be an edge of vLLM's histogram"),
        ("[contract]\nobjective = 1\n", ":2", "objective must be a share below 1"),
        ("[contract]\nobjective = nan\n", ":2", "objective must be a number above 0"),
        ("[contract]\nbuckets = 3\n", ":2", "buckets must be a list"),
        ("[contract]\nbuckets = ['x']\n", ":2", "buckets must be a number"),
        ("[site]\nlabels = []\n", ":2", "labels must be a list of label names"),
        ("[site]\nlabels = 'pod'\n", ":2", "labels must be a list of label names"),
        ("[site]\nlabels = ['a b']\n", ":2", "labels must be a list of label names"),
        ("[site]\nlabels = ['pod', 'pod']\n", ":2", "each label once"),
        ("[site]\nlabels = ['gpu']\n", ":2", "neither engine, gpu nor le"),
        ("[site]\ngrafana_url = 'grafana'\n", ":2", "grafana_url must be a URL"),
        ("[site]\nrunbook_base_url = 'javascript:x'\n", ":2", "runbook_base_url must be a URL"),
        ("[site]\nrunbok = 'x'\n", ":2", "[site] has no entry 'runbok'"),
        ("site = 3\n", ":1", "[site] must be a table"),
        (f"[limits]\n{CASCADE} = 3\n", ":2", f"[limits.{CASCADE}] must be a table"),
        (f"[limits.{CASCADE}]\n'KV cache usage (peak)' = 'high'\n", ":2", "must be a number, not 'high'"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str, place: str, sentence: str) -> None:
    with pytest.raises(BadContract) as refused:
        contract(tmp_path, text)
    assert str(refused.value).startswith(f"{tmp_path}/diag.toml{place}: ")
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[limits.kv_evictions]\nescalates = 1\n", "[limits.kv_evictions]: no incident is called 'kv_evictions'"),
        (f"[limits.{CASCADE}]\nescalates = 1\n", f"[limits.{CASCADE}] has no 'escalates'; it may have 'preemptions /"),
    ],
)
def test_a_limit_that_sets_nothing_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(BadContract) as refused:
        apply_overrides(load(), contract(tmp_path, text))
    assert sentence in str(refused.value)
