"""The release workflow: it names what it uses of others by commit, and runs the tasks that contributors run."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import helm_python
import pytest
import yaml
from support.paths import ROOT

from diag import __version__
from diag.cli.app import app

WORKFLOW = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
JOBS = yaml.safe_load(WORKFLOW)["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]


def test_every_action_is_named_by_a_whole_commit_and_its_release() -> None:
    used = re.findall(r"uses: (.*)", WORKFLOW)
    assert len(used) == len([step for step in STEPS if "uses" in step])
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", name)] == []


def test_only_the_publishing_job_may_sign_and_it_runs_no_repository_code() -> None:
    signing = {name for name, job in JOBS.items() if "id-token" in job["permissions"]}
    assert signing == {"registry", "publish", "github"}
    checked_out = {
        name for name, job in JOBS.items() if any("checkout" in step.get("uses", "") for step in job["steps"])
    }
    assert not signing & checked_out


def test_release_workflow_runs_the_tasks_of_a_contributor() -> None:
    named = {name for step in STEPS for name in re.findall(r"nox -s ([a-z ]+)", step.get("run", ""))}
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE))
    tasks = {task for names in named for task in names.split()}
    assert tasks == {"package", "installed", "oldest"}
    assert tasks <= sessions


def test_a_pushed_image_has_two_architectures_an_sbom_and_a_signature() -> None:
    built, joined = JOBS["image"], "\n".join(step.get("run", "") for step in JOBS["registry"]["steps"])
    runs = "\n".join(step.get("run", "") for step in built["steps"])
    architectures = [each["architecture"] for each in built["strategy"]["matrix"]["include"]]
    assert all(option in runs for option in ("--push", "--sbom=true", "--provenance=mode=max"))
    assert all(f'"$image:$version-{name}"' in joined for name in architectures)
    signed = [step["with"] for step in JOBS["registry"]["steps"] if "attest" in step.get("uses", "")]
    assert [each["push-to-registry"] for each in signed] == [True, True]


def test_every_script_of_the_workflow_is_valid_shell() -> None:
    for step in STEPS:
        assert subprocess.run(["bash", "-n", "-c", step.get("run", "")], check=False).returncode == 0


def test_a_packaged_chart_names_the_image_of_its_repository(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / ".ci" / "package-chart", tmp_path, "Owner/Diag"], check=True)
    with helm_python.Chart.load(tmp_path / f"diag-{__version__}.tgz") as chart:
        values = {"mode": "daemonset", "prometheusRule": {"enabled": False}, "dashboards": {"enabled": False}}
        made = chart.render(values, name="diag", namespace="inference")
    assert f"image: ghcr.io/owner/diag:{__version__}\n" in made["diag/templates/workload.yaml"]


def test_the_chart_and_the_example_images_have_the_version_of_the_package() -> None:
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "diag" / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    pages = ("deploy/kubernetes-sidecar.yaml", "docs/kubernetes.md")
    images = {name for page in pages for name in re.findall(r"/diag:(\S+)", (ROOT / page).read_text(encoding="utf-8"))}
    assert images == {__version__}


def test_the_skill_is_short_and_names_only_commands_that_exist_and_llms_txt_only_pages() -> None:
    skill = (ROOT / "skills" / "diag" / "SKILL.md").read_text(encoding="utf-8")
    assert len(skill.splitlines()) <= 60
    named = set(re.findall(r"`diag ([a-z]+)", skill)) | set(re.findall(r"uvx diag ([a-z]+)", skill))
    assert {"doctor", "gpus", "lint", "bundle"} <= named <= {command.name or "" for command in app.registered_commands}
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text(encoding="utf-8"))
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_each_extra_that_a_sentence_asks_for_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pages = (path for folder in ("diag", "docs", "skills") for path in (ROOT / folder).rglob("*.*"))
    texts = (path.read_text(encoding="utf-8") for path in pages if path.suffix in (".py", ".toml", ".md"))
    asked = {name for text in texts for names in re.findall(r"\bdiag\[([a-z,\d]+)]", text) for name in names.split(",")}
    assert {"pandas", "top", "k8s"} <= asked <= extras.keys()


@pytest.mark.slow
def test_without_pandas_a_table_asks_for_it_and_nothing_else_does(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['pandas'] = None; from diag.__main__ import main; main()"
    recording = str(ROOT / "tests" / "recordings" / "kv_cascade")
    table, doctor = (
        subprocess.run([sys.executable, "-c", hidden, *words, recording], capture_output=True, text=True, check=False)
        for words in (("export",), ("doctor", "--quiet"))
    )
    assert (table.returncode, table.stderr) == (64, "diag: tables need pandas: pip install 'diag[pandas]'\n")
    assert doctor.returncode == 2
