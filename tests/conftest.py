"""Goldens that can be renewed, and skips that CI does not let pass."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from support.paths import GOLDENS, ROOT, TESTS
from support.sampling import THOROUGH
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling

OPTIONAL = ("promqltest", "no Kubernetes API server")
"""Reasons to skip: Prometheus' own scripts are never shipped, a Kubernetes API server takes ten minutes to build."""
LIVE = ("test_two_ranks", "test_small_server", "test_tiny_server", "test_log_of_clients", "test_outages")
"""The live files that take minutes, in the order in which two processes wait least for each other's servers."""
WAITING = ("test_messages", "test_compose")
"""The files that wait for minutes and compute nothing: they come first, beside all others."""
FIRST = ("recordings",)
"""The folders whose tests wait for no other process: they come next, while live tests beside them keep the cores."""
TOGETHER = {
    "the reports on all recordings": (
        "test_recordings",
        "test_one_answer",
        "test_terminal_report",
        "test_report_html",
        "test_dropped_telemetry",
    ),
    "vLLM's parser": (
        "test_installed_parser",
        "test_launch_corpus",
        "test_flag_registry",
        "test_proposals_by_release",
    ),
}
"""Files that share what a process makes once, in ten seconds or more of CPU: they run in one."""
FAST = ("unit",)
"""The folders whose tests need nothing but Python, and a minute; tests elsewhere say that they are fast themselves."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write what is printed now as what is expected")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m fast` reads only the files that have such tests: the imports of the others were half of a collection."""
    if config.option.markexpr != "fast" or collection_path.suffix != ".py" or TESTS not in collection_path.parents:
        return None
    is_fast = collection_path.relative_to(TESTS).parts[0] in FAST or "mark.fast" in collection_path.read_text("utf-8")
    return None if is_fast else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Live tests in their order; `-m fast` is what a contributor runs all the time, `-m golden` compares outputs."""
    if not THOROUGH and (nightly := [item for item in items if item.get_closest_marker("nightly")]):
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]
    items.sort(key=lambda item: LIVE.index(item.path.stem) if item.path.stem in LIVE else len(LIVE))
    items.sort(key=lambda item: (item.path.stem not in WAITING, item.path.parent.name not in FIRST))
    for item in items:
        needs = {mark.name for mark in item.iter_markers()} & {"live", "prometheus", "slow"}
        if item.path.relative_to(TESTS).parts[0] in FAST and not needs:
            item.add_marker("fast")
        if "golden" in getattr(item, "fixturenames", ()):
            item.add_marker("golden")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """The tests of a file run in one process, and those of files that share something slow."""
    config.option.loadscopereorder = False  # those in tests/unit, which are the quickest, come last
    return _Together(config, log)


class _Together(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((name for name, files in TOGETHER.items() if Path(file).stem in files), file)


gc.set_threshold(100_000)  # as `diag` itself has it: a third of the time of a collection went into looking for garbage


def pytest_collection_finish() -> None:
    """Ten thousand tests stay until the end: looking for garbage among them again and again is lost time."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    hypothesis.settings.register_profile("unhurried", deadline=None, max_examples=100 if THOROUGH else 25)
    hypothesis.settings.load_profile("unhurried")  # no deadline, since the machine may be busy
    os.environ.update(GOGC="1000", GOMEMLIMIT="1GiB")  # a Prometheus of a test spends a third of its time on garbage


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Fail the run with DIAG_NO_SKIPS if a component is missing, but for the reasons in OPTIONAL."""
    report = yield
    is_missing = report.skipped and not any(reason in str(report.longrepr) for reason in OPTIONAL)
    if is_missing and os.environ.get("DIAG_NO_SKIPS"):
        report.outcome = "failed"
    return report


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a whole output with the file of that name under tests/goldens."""

    def compare(name: str, text: str) -> None:
        file = GOLDENS / name
        if request.config.getoption("--update-goldens"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        expected = file.read_text(encoding="utf-8") if file.exists() else None
        assert text == expected, f"{file}: pytest -m golden --update-goldens writes it; then read the diff"

    return compare


@pytest.fixture(autouse=True)
def _control_c_interrupts() -> None:
    """A program that a test starts ignores Ctrl-C where its parent does: as a job of the shell, or after `main()`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in outputs are relative to the checkout, and nobody's diag.toml or credentials play a part."""
    monkeypatch.chdir(ROOT)
    for name in [each for each in os.environ if each.startswith("DIAG_") and each.endswith(("TOKEN", "AUTH", "FILE"))]:
        monkeypatch.delenv(name)
