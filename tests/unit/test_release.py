"""The release workflow: it names what it uses of others by commit, and runs the tasks that contributors run."""

import re

import yaml
from support.paths import ROOT

from diag import __version__

WORKFLOW = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
JOBS = yaml.safe_load(WORKFLOW)["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]


def test_every_action_is_named_by_a_whole_commit_and_its_release() -> None:
    used = re.findall(r"uses: (.*)", WORKFLOW)
    assert len(used) == len([step for step in STEPS if "uses" in step])
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", name)] == []


def test_only_the_publishing_job_may_sign_and_it_runs_no_repository_code() -> None:
    signing = {name for name, job in JOBS.items() if "id-token" in job["permissions"]}
    assert signing == {"publish", "github"}
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


def test_the_chart_and_the_example_images_have_the_version_of_the_package() -> None:
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "diag" / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    pages = ("deploy/kubernetes-sidecar.yaml", "docs/kubernetes.md")
    images = {name for page in pages for name in re.findall(r"/diag:(\S+)", (ROOT / page).read_text(encoding="utf-8"))}
    assert images == {__version__}
