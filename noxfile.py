"""The tasks of a contributor: `nox -l` lists them, `nox -s fast` runs one."""

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
    session.run("pytest", "-m", "live", *session.posargs)


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
def generate(session: nox.Session) -> None:
    """Write alerts, dashboards, runbooks and reference pages again."""
    _install(session)
    session.run("diag", "generate")


@nox.session
def goldens(session: nox.Session) -> None:
    """Write the expected outputs again; read the diff before you commit it."""
    _install(session)
    session.run("pytest", "-m", "golden", "--update-goldens", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build docs/ into docs/_build; every warning, a broken link for one, is an error."""
    _install(session)
    session.run("sphinx-build", "-W", "--keep-going", "-q", "docs", "docs/_build")
