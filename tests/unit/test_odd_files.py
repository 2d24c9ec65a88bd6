"""Files that are none, that never end or that stand for more than they hold: one sentence, at once, by every reader."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diag.commands import budget, lint
from diag.commands.budget import estimate
from diag.commands.mcp.targets import allow
from diag.commands.observe import ObserveOptions
from diag.commands.options import BudgetOptions
from diag.core import files
from diag.core.contract import read as read_contract
from diag.core.errors import BadContract, BadDeclaration, BadRecording, BadUsage
from diag.core.files import opened, read_bytes
from diag.http.address import from_environment
from diag.knowledge.catalog import load as load_incidents
from diag.log.memory_sizes import read_memory_log
from diag.sources.kubernetes.cluster import cluster_of
from diag.sources.recording.reader import read as read_recording
from diag.vllm.command.command import read_config_file
from diag.vllm.memory.model import CACHE_VARIABLES
from diag.vllm.memory.model import read as read_model

PAGES = "".join(f"# scrape {at} h:1\nvllm:num_requests_running 1\n" for at in (1, 3, 5))
ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
}


def _recording(file: Path) -> object:
    (file.parent / "metrics.prom").write_text(PAGES)
    return read_recording(file.parent)


READERS: dict[str, tuple[str, type[Exception], Callable[[Path], object]]] = {
    "diag.toml": ("diag.toml", BadContract, read_contract),
    "recording.toml": ("recording.toml", BadRecording, _recording),
    "--config": ("c.yaml", BadUsage, read_config_file),
    "budget --log": ("vllm.log", BadUsage, lambda file: read_memory_log(str(file))),
    "config.json": ("config.json", BadUsage, lambda file: read_model(file.parent)),
    "token": ("token", BadUsage, lambda file: from_environment({"DIAG_BEARER_TOKEN_FILE": str(file)})),
    "incident": ("x.incident", BadDeclaration, lambda file: load_incidents(file.parent)),
    "incident in Python": ("x.py", BadDeclaration, lambda file: load_incidents(file.parent)),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ODD)
def test_irregular_file_is_refused_in_one_sentence(kind: str, reader: str, tmp_path: Path) -> None:
    name, error, read = READERS[reader]
    ODD[kind](tmp_path / name)
    with pytest.raises(error, match=r"\A[^\n]*not a regular file\Z"):
        read(tmp_path / name)


@contextmanager
def substituted(text: bytes, ends: bool = True) -> Iterator[Path]:
    """A pipe as a shell opens one for `<(...)`, and its writer."""
    out, into = os.pipe()
    os.write(into, text)
    try:
        if ends:
            os.close(into)
        yield Path(f"/dev/fd/{out}")
    finally:
        os.close(out)
        if not ends:
            os.close(into)


@pytest.mark.timeout(10)
def test_diag_toml_and_tokens_may_come_from_a_process_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    with substituted(b"[contract]\nttft_seconds = 7.5\n") as file:
        assert read_contract(file).ttft_seconds == 7.5
    with substituted(b"secret\n") as file:
        assert "secret" in str(from_environment({"DIAG_BEARER_TOKEN_FILE": str(file)}).headers)
    with substituted(b"#" * 65_000) as file, pytest.raises(OSError, match="larger than"):
        read_bytes(file, 64_000, piped=True)
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.1)
    with substituted(b"[contract]", ends=False) as file, pytest.raises(BadContract, match="has not ended within"):
        read_contract(file)
    with substituted(b"model: m\n") as file, pytest.raises(BadUsage, match="it is a pipe, not a regular file"):
        read_config_file(file)  # a word of the command of another process


@pytest.mark.timeout(10)
def test_a_recorded_log_that_is_a_pipe_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "server.log")
    assert len(_recording(tmp_path / "x").instances) == 1  # type: ignore[attr-defined]


def test_a_sparse_file_is_refused_by_its_size(tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match=r"it is larger than 0\.5 MiB"):
        read_bytes(tmp_path / "big", 2**19)


@pytest.mark.parametrize(("name", "reason"), [("x" * 300, "File name too long"), ("a\0b", "a NUL in it")])
def test_a_name_that_no_file_can_have_is_an_os_error(name: str, reason: str) -> None:
    with pytest.raises(OSError, match=reason), opened(name):
        pass


LONG = "x" * 300
NO_FILES: dict[str, Callable[[str], object]] = {
    "lint": lambda name: lint.run([name], lint.LintOptions("0.32.0"), as_json=False),
    "budget": lambda name: budget.run(BudgetOptions(name, all_gpus=True)),
    "budget of a command": lambda name: budget.run(BudgetOptions(f"vllm serve m {name}", all_gpus=True)),
    "mcp": lambda name: allow([], Path(name), "", ObserveOptions([])),
}


@pytest.mark.parametrize("reader", NO_FILES)
@pytest.mark.parametrize("name", [LONG, f"x/{LONG}", "a/" * 3000, "a\0b"])
def test_a_name_that_no_file_can_have_is_refused_in_a_sentence(reader: str, name: str) -> None:
    with pytest.raises(BadUsage):
        NO_FILES[reader](name)


def test_a_kubeconfig_of_a_name_that_no_file_can_have_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes")
    monkeypatch.setenv("KUBECONFIG", LONG)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(BadUsage, match="there is no kubeconfig at xxx"):
        cluster_of("inference")


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LAUGHS, "has more than 100,000 values"),
        ("a: &a\n  b: *a\n", "the alias *a has no value yet"),
        ("&a [*a]", "the alias *a has no value yet"),
        ("[" * 100, "nested more than 64 deep"),
        ("[" * 100_000, "nest"),  # PyYAML 6.0.4 has a bound of its own and reads ahead
        ("max-num-seqs: " + "9" * 5_000, "a number has more than 64 digits"),
        ("max-num-seqs: 1" + ":59" * 5_000, "a number has more than 64 digits"),
        ("a: 2026-13-45", "month must be in 1..12"),
        ("? [a]\n: 1", "this is no YAML"),
        ("!!python/object/apply:os.getcwd []", "this is no YAML"),
        ("a: b\n" * 300_000, "it is larger than 1 MiB"),
    ],
    ids=lambda text: text[:20],
)
def test_yaml_beyond_its_bounds_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(BadUsage, match=r"\A[^\n]*\Z") as error:
        read_config_file(tmp_path / "c.yaml")
    assert reason in str(error.value)


def test_ordinary_yaml_alias_is_read(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n")
    assert files.read_yaml(tmp_path / "c.yaml") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = " + "[" * 5_000, "nested more than 32 deep"),
        ("a = " + "[" * 40 + "]" * 40, "nested more than 32 deep"),
        ("a." * 200_000 + "a = 1", "a key has more than 32 parts"),
        ("a = " + "9" * 5_000, "Exceeds the limit"),
        ("a = " + "9" * 400, "a whole number of more than 64 bits"),
        ("a = '" + "x" * 2**20 + "'", "larger than 1 MiB"),
    ],
    ids=lambda text: text[:12],
)
def test_toml_beyond_its_bounds_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "diag.toml").write_text(text)
    with pytest.raises((OSError, ValueError), match=reason):
        files.read_toml(tmp_path / "diag.toml")


@pytest.mark.parametrize("code", ["def (", "import nothing_of_that_name", "raise SystemExit(0)", "raise BaseException"])
def test_an_incident_file_that_cannot_be_run_is_refused(code: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(code)
    with pytest.raises(BadDeclaration, match=r"\A[^\n]*x\.py(?::1)?: [^\n]*\Z"):
        load_incidents(tmp_path)


def test_a_log_on_standard_input_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diag.log.memory_sizes.FIRST", 2**10)
    monkeypatch.setattr("diag.log.memory_sizes.LAST", 2**10)
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        monkeypatch.setattr("sys.stdin", type("Stdin", (), {"buffer": endless.stdout}))
        with pytest.raises(BadUsage, match="standard input has more than"):
            read_memory_log("-")
        endless.terminate()


HOMELESS = ("vllm serve ~nouser/m", *(f"{name}=~nouser vllm serve a/b" for name in CACHE_VARIABLES))


@pytest.mark.parametrize("words", HOMELESS)
def test_home_of_an_unknown_user_is_no_folder(words: str) -> None:
    assert "nouser" in lint.run(words, lint.LintOptions("0.32.0"), as_json=False)[0]
    with pytest.raises(BadUsage, match="is neither a folder nor in the local cache"):
        estimate(BudgetOptions(words, "h100"))


def test_kubeconfig_of_an_unknown_user_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes")
    monkeypatch.setenv("KUBECONFIG", "~nouser/config")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(BadUsage, match="there is no kubeconfig at ~nouser/config"):
        cluster_of("inference")
