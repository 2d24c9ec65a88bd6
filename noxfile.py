"""The tasks of a contributor: `nox -l` lists them, `nox -s fast` runs one."""

import os
import shutil
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["fast", "lint"]


def _install(session: nox.Session) -> None:
    session.install("-q", "-e", ".[test]")


@nox.session
def fast(session: nox.Session) -> None:
    """What a contributor runs all the time: under a minute, needs nothing but Python."""
    _install(session)
    session.run("pytest", "-n", "2", "-m", "fast", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Everything but a real vLLM; tests whose component is not installed are skipped with the reason."""
    _install(session)
    session.run("pytest", "-n", "4", "-m", "not live", *session.posargs)


@nox.session
def live(session: nox.Session) -> None:
    """A real vLLM on the CPU; DIAG_VLLM_PYTHON names the interpreter that has it (.ci/components makes one)."""
    _install(session)
    session.run("pytest", "-n", "2", "-m", "live", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, layers, generated files."""
    _install(session)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")
    session.run("diag", "generate", "--check")


@nox.session
def docs(session: nox.Session) -> None:
    """Build docs/ into docs/_build; every warning, a broken link for one, is an error."""
    _install(session)
    session.run("sphinx-build", "-W", "--keep-going", "-q", "docs", "docs/_build")
    session.run("python", "docs/journeys.py", "docs/_build")


@nox.session
def pictures(session: nox.Session) -> None:
    """Draw the pictures of the documentation; needs chromium, Prometheus and npm. Look at them afterwards."""
    _install(session)
    session.install("-q", "playwright")
    session.run("python", "docs/pictures.py", *session.posargs)


def _built(pattern: str) -> list[str]:
    return sorted(map(str, Path("dist").glob(pattern)))


@nox.session
def package(session: nox.Session) -> None:
    """Build the sdist, the wheel from it, the chart and the list of dependencies (SBOM), into dist/, and check them."""
    session.install("-q", "build", "twine", "check-wheel-contents", "cyclonedx-bom", "helm-python-sdk")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "-q")
    session.run("twine", "check", "--strict", *_built("*"))
    session.run("check-wheel-contents", *_built("*.whl"))
    session.run("python", ".ci/check-dist", "dist", *session.posargs)
    empty = Path(session.create_tmp(), "empty")
    session.run("python", "-m", "venv", "--clear", "--without-pip", str(empty))
    session.run("python", "-m", "pip", "--python", str(empty), "install", "-q", *_built("*.whl"))
    session.run("cyclonedx-py", "environment", str(empty), "--output-reproducible", "-o", "dist/diag.cdx.json")
    session.run("python", ".ci/package-chart", "dist", *filter(None, [os.environ.get("GITHUB_REPOSITORY")]))


def _resolve(session: nox.Session, resolution: str, *more: str) -> None:
    """Install what pyproject.toml needs; the oldest release is the oldest that has a wheel for this Python."""
    options = ("--only-binary=:all:", f"--resolution={resolution}", "-r", "pyproject.toml")
    session.run("uv", "pip", "install", "-q", *options, *more)


@nox.session(python=["3.11", "3.12", "3.13", "3.14"], venv_backend="uv")
@nox.parametrize("resolution", ["highest", "lowest-direct"])
def installed(session: nox.Session, resolution: str) -> None:
    """Install dist/*.whl with the newest or the oldest dependencies that it allows, and run the README's main job."""
    (wheel,) = _built("*.whl")
    _resolve(session, resolution)
    session.run("uv", "pip", "install", "-q", "--no-deps", "--reinstall", wheel)
    recording = Path("tests/recordings/kv_cascade").resolve()
    session.chdir(session.create_tmp())
    session.run("diag", "--version")
    session.run("diag", "doctor", str(recording), success_codes=[2])


@nox.session(python="3.11", venv_backend="uv")
def oldest(session: nox.Session) -> None:
    """The fast tests with the oldest dependencies that pyproject.toml allows."""
    _resolve(session, "lowest-direct", "--extra=test")
    session.run("uv", "pip", "install", "-q", "--no-deps", "-e", ".")
    session.run("pytest", "-n", "2", "-m", "fast", *session.posargs)
