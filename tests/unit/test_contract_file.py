"""diag.toml: what it sets is what doctor, alerts and dashboards use; what is wrong in it is refused with its place."""

import re
from pathlib import Path

import pytest
from support.paths import ROOT

from diag.commands.observe import site
from diag.core.contract import Contract, Site, apply_overrides, read, with_settings
from diag.core.errors import BadContract
from diag.core.incident import Incident
from diag.knowledge.catalog import load

CASCADE = "kv_eviction_cascade"
THERMAL = "gpu_thermal_throttling"


def overridden(name: str, contract: Contract) -> Incident:
    return next(incident for incident in apply_overrides(load(), contract) if incident.id == name)


def contract(folder: Path, text: str) -> Contract:
    (folder / "diag.toml").write_text(text, encoding="utf-8")
    return read(folder / "diag.toml")


def test_missing_key_of_diag_toml_keeps_its_default(tmp_path: Path) -> None:
    read = contract(tmp_path, "[contract]\nttft_seconds = 2.5\n")
    assert read.values() == {**Contract().values(), "ttft_seconds": 2.5}
    assert f"TTFT SLO: 2.5 s ({tmp_path}/diag.toml)" in read.lines()
    assert "ITL SLO: 2.5 s (default)" in read.lines()
    assert "SLO objective: 99 % (default)" in read.lines()


def test_a_site_names_its_labels_and_its_pages(tmp_path: Path) -> None:
    text = """
        [site]
        labels = ["cluster", "pod"]
        gpu_join = ["node"]
        runbook_base_url = "https://wiki.example/vllm/"
        grafana_url = "https://grafana.example"
        prefix = "kserve_vllm:"
    """
    assert contract(tmp_path, text).site == Site(
        ("cluster", "pod"), ("node",), "https://wiki.example/vllm", "https://grafana.example", prefix="kserve_vllm:"
    )


def test_the_spelling_of_the_chart_and_settings_of_the_command_line_are_entries_of_the_site(tmp_path: Path) -> None:
    text = "[site]\nsiteLabels = ['namespace', 'pod']\nrunbookBaseUrl = 'https://w/{page}'\n"
    by_file = contract(tmp_path, f"{text}[site.extraLabels]\nteam = 'a'\n").site
    settings = ["siteLabels=namespace,pod", "runbookBaseUrl=https://w/{page}", "extraLabels.team=a"]
    assert by_file == with_settings(Contract(), settings).site
    assert (by_file.labels, by_file.extra_labels) == (("namespace", "pod"), {"team": "a"})
    assert [by_file.runbook_url("kv"), Site(runbook_base_url="https://w").runbook_url("kv")] == [
        "https://w/kv",
        "https://w/kv.md",
    ]
    for wrong in (["grafanaUrl"], ["extraLabels=x", "extraLabels.team=a"]):
        with pytest.raises(BadContract, match=r"--set (grafanaUrl|extraLabels.team=a): must be NAME=VALUE"):
            with_settings(Contract(), wrong)


def test_slo_can_be_an_additional_bucket(tmp_path: Path) -> None:
    assert contract(tmp_path, "[contract]\nttft_seconds = 3\nbuckets = [0.7, 3]\n").ttft_seconds == 3


def test_site_threshold_replaces_the_default_and_is_named(tmp_path: Path) -> None:
    read = contract(tmp_path, f'[limits.{CASCADE}]\n"preemptions / finished request" = 0.35\n')
    cascade = overridden(CASCADE, read)
    first = cascade.symptoms[0]
    assert (first.limit, first.why.kind) == (0.35, "judged")
    assert "diag.toml; the default is 0.2: " in first.why.says
    assert cascade.symptoms[1:] == overridden(CASCADE, Contract()).symptoms[1:]


def test_a_threshold_also_applies_to_what_rules_a_look_alike_out(tmp_path: Path) -> None:
    read = contract(tmp_path, '[limits.gpu_thermal_throttling]\n"thermal slowdown (share of time)" = 0.1\n')
    hot = overridden(THERMAL, read)
    assert [look_alike.refuted_by.limit for look_alike in hot.looks_like if look_alike.refuted_by] == [0.1]


def test_the_threshold_that_escalates_has_a_key_of_its_own(tmp_path: Path) -> None:
    read = contract(tmp_path, '[limits.gpu_thermal_throttling]\nescalates = 0.3\n"SM clock below its maximum" = 0.1\n')
    hot = overridden(THERMAL, read)
    assert hot.escalates and hot.escalates.limit == 0.3
    assert next(support.limit for support in hot.supports if support.signal.name == "SM clock below its maximum") == 0.1


@pytest.mark.parametrize(
    ("text", "place", "sentence"),
    [
        ("[contrct]\n", ":1", "there is no table [contrct]; the tables are [contract], [limits], [site]"),
        ("[contract]\n\nfreze_seconds = 1\n", ":3", "[contract] has no key 'freze_seconds'"),
        ("[contract]\nttft_seconds = 3\n", ":2", "ttft_seconds must be a bucket of vLLM's histogram (0.001, "),
        ("[contract]\nobjective = 1\n", ":2", "objective must be a fraction below 1 (0.99 is 99 %), not 1"),
        ("[contract]\nobjective = nan\n", ":2", "objective must be a number above 0"),
        ("[contract]\nbuckets = 3\n", ":2", "buckets must be a list"),
        ("[contract]\nbuckets = ['x']\n", ":2", "buckets must be a number"),
        ("[site]\nlabels = []\n", ":2", "labels must be a list of label names"),
        ("[site]\nlabels = 'pod'\n", ":2", "labels must be a list of label names"),
        ("[site]\nlabels = ['a b']\n", ":2", "labels must be a list of label names"),
        ("[site]\nlabels = ['pod', 'pod']\n", ":2", "each label once"),
        ("[site]\nlabels = ['gpu']\n", ":2", "none of engine, gpu and le"),
        ("[site]\ngrafana_url = 'grafana'\n", ":2", "grafana_url must be a URL"),
        ("[site]\nrunbook_base_url = 'javascript:x'\n", ":2", "runbook_base_url must be a URL"),
        ("[site]\nprefix = 'kserve_'\n", ":2", "prefix must end in vllm: or vllm_"),
        ("[site]\nrunbok = 'x'\n", ":2", "[site] has no key 'runbok'"),
        ("[site]\nrunbookBaseUrl = 'https://x/{y}'\n", ":2", "runbookBaseUrl must be a URL"),
        ("[site]\ndisabledIncidents = 'x'\n", ":2", "disabledIncidents must be a list of incidents"),
        ("[site]\nseverity_overrides = {a = 'page'}\n", ":2", "must have severities, info, warning, critical"),
        ("[site]\nextra_labels = {a = 1}\n", ":2", "extra_labels must be a table of texts"),
        ("[site]\nextra_labels = {'a b' = 'x'}\n", ":2", "extra_labels must have names of labels"),
        ("[ignore.x]\nreason = ''\nuntil = 2099-01-01\n", ":2", "reason must be a text that says why"),
        ("[ignore.x]\nreason = 'a'\nuntil = '2099-01-01'\n", ":3", "until must be the last day, such as 2027-01-31"),
        ("[ignore]\nx = 'a'\n", ":2", "[ignore.x] must be a table"),
        ("site = 3\n", ":1", "[site] must be a table"),
        (f"[limits]\n{CASCADE} = 3\n", ":2", f"[limits.{CASCADE}] must be a table"),
        (
            f"[limits.{CASCADE}]\n'KV cache usage with one more request (peak)' = 'high'\n",
            ":2",
            "must be a number, not 'high'",
        ),
    ],
)
def test_invalid_diag_toml_is_refused_with_its_line(tmp_path: Path, text: str, place: str, sentence: str) -> None:
    with pytest.raises(BadContract) as refused:
        contract(tmp_path, text)
    assert str(refused.value).startswith(f"{tmp_path}/diag.toml{place}: ")
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[limits.kv_evictions]\nescalates = 1\n", "[limits.kv_evictions]: there is no incident 'kv_evictions'"),
        ("[site]\ndisabledIncidents = ['x']\n", "disabledIncidents: there is no incident 'x'"),
        ("[ignore.x]\nreason = 'a'\nuntil = 2099-01-01\n", "[ignore.x]: there is no incident 'x'"),
        (
            f"[limits.{CASCADE}]\nescalates = 1\n",
            f"[limits.{CASCADE}] has no threshold 'escalates'; it has 'preemptions /",
        ),
    ],
)
def test_unknown_threshold_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(BadContract) as refused:
        apply_overrides(load(), contract(tmp_path, text))
    assert sentence in str(refused.value)


def test_the_documented_file_is_accepted(tmp_path: Path) -> None:
    documented = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / "slo.md").read_text(encoding="utf-8"), re.DOTALL)
    assert documented
    site = contract(tmp_path, documented[1])
    assert (site.ttft_seconds, site.site.labels) == (2.5, ("cluster", "namespace", "pod"))
    assert overridden(CASCADE, site).symptoms[0].limit == 0.3


def test_threshold_under_its_old_name_counts_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contract(tmp_path, f"[limits.{CASCADE}]\n'KV cache usage (peak)' = 0.5\n")
    _, incidents = site(None, tmp_path / "diag.toml")
    limits = {
        each.signal.name: each.limit for incident in incidents if incident.id == CASCADE for each in incident.symptoms
    }
    assert limits["KV cache usage with one more request (peak)"] == 0.5
    told = capsys.readouterr().err
    assert "'KV cache usage (peak)' is now called 'KV cache usage with one more request (peak)'" in told
