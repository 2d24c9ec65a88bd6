"""A bundle: judged elsewhere as the recording was, without secrets, bounded, and refused if it was changed."""

import hashlib
import io
import json
import shutil
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from support.bad_servers import PAGE, pages, serving
from support.bundles import members
from support.cli import diag
from support.paths import ROOT
from support.secrets import corpus, is_shown

from diag.commands.bundle import OF_A_POD, WHAT
from diag.core.errors import BadRecording
from diag.sources.kubernetes.servers import MOST_PODS_KEPT
from diag.sources.recording import bundle

KEPT = ROOT / "tests/recordings"
MIB = 2**20


def repacked(files: dict[str, bytes], to: Path, link: str = "", folder: str = "") -> Path:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        if link:
            member = tarfile.TarInfo("server.log")
            member.type, member.linkname = tarfile.SYMTYPE, link
            archive.addfile(member)
        if folder:
            member = tarfile.TarInfo(folder)
            member.type = tarfile.DIRTYPE
            archive.addfile(member)
    to.write_bytes(zstandard.compress(raw.getvalue()))
    return to


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("bundle") / "sick.tar.zst"
    assert diag("bundle", str(KEPT / "engine_dead"), "-o", str(file)).returncode == 0
    return file


def test_it_is_judged_as_the_recording_was(kept: Path) -> None:
    there, here = (diag("doctor", str(each), "--json") for each in (KEPT / "engine_dead", kept))
    assert there.returncode == here.returncode == 2
    assert there.stdout == here.stdout.replace(str(kept), str(KEPT / "engine_dead"))


BODIES = (
    *("Received request cmpl-1: prompt: 'my diary', params: SamplingParams(n=1)", "Request cmpl-1 JSON body: my diary"),
    *("Request cmpl-1 details: prompt: 'my diary'", "Generated response cmpl-1 (streaming delta): output: 'my diary'"),
    "forged\x85(EngineCore pid=8) ERROR 11-21 19:00:00 [core.py:1] EngineCore encountered a fatal error.",
)


def test_no_secret_of_a_log_is_in_any_of_its_files(tmp_path: Path) -> None:
    folder, file = tmp_path / "recording", tmp_path / "sick.tar.zst"
    shutil.copytree(KEPT / "engine_dead", folder)
    secrets = list(corpus())
    about = (folder / "recording.toml").read_text(encoding="utf-8")
    noted = "".join(f"note_{at} = {json.dumps(each.text)}\n" for at, each in enumerate(secrets))
    launch = 'launch = "VLLM_API_KEY=sk-0123456789abcdefghij vllm serve m --api-key sk-zyxwvutsrqponml98765"'
    (folder / "recording.toml").write_text(
        f"{launch}\n{noted}{about.replace('launch =', 'former =')}", encoding="utf-8"
    )
    with (folder / "server.log").open("a", encoding="utf-8") as log:
        log.writelines(f"{each.text}\n" for each in secrets)
        log.writelines(f"(APIServer pid=7) INFO 11-21 19:00:00 [request_logger.py:62] {line}\n" for line in BODIES)
    host = {f"note_{at}": each.text for at, each in enumerate(secrets)}
    (folder / "host.json").write_text(json.dumps(host), encoding="utf-8")
    shutil.copy(folder / "server.log", folder / "pod-p_8000.previous.log")  # a bundle of pods, made again
    assert diag("bundle", str(folder), "-o", str(file)).returncode == 0
    assert members(file)["pod-p_8000.previous.log"] == members(file)["server.log"]
    text = b"\n".join(members(file).values()).decode(errors="replace")
    assert "my diary" not in text and "Received request cmpl-1: [left out]" in text
    assert "forged\x85(EngineCore" in text
    assert [each for each in secrets if is_shown(each.secret, text)] == []
    assert "0123456789abcdefghij" not in text and "zyxwvutsrqponml98765" not in text
    assert "vllm serve m --api-key" in tomllib.loads(members(file)["recording.toml"].decode())["launch"]


def test_a_launch_without_secrets_is_kept_whole(kept: Path) -> None:
    before = tomllib.loads((KEPT / "engine_dead" / "recording.toml").read_text(encoding="utf-8"))
    assert tomllib.loads(members(kept)["recording.toml"].decode()) == before


def test_credentials_in_an_address_are_in_no_file(tmp_path: Path) -> None:
    file = tmp_path / "sick.tar.zst"
    with serving(pages(PAGE)) as server:
        url = server.url.replace("://", "://user:s3cretpass@")
        assert diag("bundle", url, "-o", str(file), "--every", "0.5", "--for", "1").returncode == 0
    assert b"s3cretpass" not in b"".join(members(file).values())


@pytest.mark.nightly
def test_of_a_log_of_a_gigabyte_both_ends_are_kept(tmp_path: Path) -> None:
    folder, file = tmp_path / "recording", tmp_path / "sick.tar.zst"
    shutil.copytree(KEPT / "engine_dead", folder)
    text = (folder / "server.log").read_bytes()
    with (folder / "server.log").open("wb") as log:
        log.write(text * (4 * MIB // len(text)))
        log.seek(1024 * MIB)
        log.write(text * (16 * MIB // len(text)))
    assert diag("bundle", str(folder), "-o", str(file)).returncode == 0
    assert file.stat().st_size < 20 * MIB
    log_kept = members(file)["server.log"]
    assert b"[... left out ...]" in log_kept and log_kept.count(text.splitlines()[-1]) > 2
    assert set(log_kept.splitlines()) <= {*text.splitlines(), b"[... left out ...]"}  # no line is cut


def test_a_folder_whose_name_is_not_utf_8_is_bundled(tmp_path: Path) -> None:
    folder = tmp_path / "a\udcff"
    shutil.copytree(KEPT / "engine_dead", folder)
    assert diag("bundle", str(folder), "-o", str(tmp_path / "b\udcff")).returncode == 0
    assert "a\\udcff" in members(tmp_path / "b\udcff")["doctor.json"].decode()


def test_an_issue_has_the_sections_of_the_template(kept: Path) -> None:
    text = diag("bundle", str(kept), "--issue").stdout
    sections = ["### Your current environment", "### 🐛 Describe the bug", "### Before submitting a new issue..."]
    assert [line for line in text.splitlines() if line.startswith("### ")] == sections
    assert r"engine\_dead" in text and "vLLM 0.32.0" in text and "--model" in text


def changed(kept: Path, folder: Path) -> Iterator[Path]:
    files = members(kept)
    yield repacked({**files, "server.log": b"another"}, folder / "changed")
    yield repacked({**files, "../outside": b"x"}, folder / "outside")
    yield repacked(files, folder / "link", link="/etc/passwd")
    yield repacked(files, folder / "folder", folder="more")
    yield repacked({name: text for name, text in files.items() if name != "manifest.json"}, folder / "bare")
    cut = folder / "cut"
    cut.write_bytes(kept.read_bytes()[:2000])
    yield cut
    bomb = folder / "bomb"
    member = tarfile.TarInfo("server.log")
    member.size = 2**31
    bomb.write_bytes(zstandard.compress(member.tobuf() + bytes(2**20)))
    yield bomb


def test_a_bundle_that_was_changed_is_refused_in_a_sentence(kept: Path, tmp_path: Path) -> None:
    for bad in changed(kept, tmp_path):
        refused = diag("doctor", str(bad))
        assert refused.returncode == 64 and "is no bundle of diag, or damaged: " in refused.stderr, (bad, refused)
        assert len(refused.stderr.splitlines()) == 1 and not refused.stdout
    assert not (tmp_path.parent / "outside").exists()


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def manifest(text: bytes) -> bytes:
    return header("manifest.json", len(text)) + text + bytes(-len(text) % 512)


NO_FILES = manifest(b'{"files": {}}')
NAMED = manifest(b'{"files": {"server.log": {"sha256": "%s"}}}' % hashlib.sha256().hexdigest().encode())
ATTACKS = {
    "header of 6 GiB": (NO_FILES + header("x", 6 * 2**30, tarfile.XHDTYPE) + bytes(MIB), "which is no file"),
    "name of 6 GiB": (NO_FILES + header("x", 6 * 2**30, tarfile.GNUTYPE_LONGNAME) + bytes(MIB), "which is no file"),
    "3,000 headers": ((header("x", 0, tarfile.XHDTYPE)) * 3_000, "it holds 'x', which is no file of a bundle"),
    "sparse file": (NAMED + header("server.log", 9, tarfile.GNUTYPE_SPARSE) + bytes(MIB), "'server.log', which is no"),
    "large manifest": (header("manifest.json", 900 * MIB) + b" " * MIB, "a manifest of at most 1 MiB"),
    "deep manifest": (manifest(b"[" * 200_000), "it is nested more than 100 deep"),
    "deep and closed": (manifest(b'{"files":' + b"[" * 900 + b"]" * 900 + b"}"), "it is nested more than 100 deep"),
    "no object": (manifest(b"[1]"), "its manifest names no files"),
    "negative size": (NAMED + header("server.log", -1), "which is no file"),
    "large file": (NAMED + header("server.log", 2**31) + bytes(MIB), "its files take more than 512 MiB"),
    "another name": (manifest(b'{"files": {"x.py": {}}}') + header("x.py", 0), "it holds 'x.py', which is no file"),
    "twice": (NAMED + 2 * header("server.log", 0), "it holds 'server.log', which is no file"),
    "no archive": (b"x" * 10_240, "is no bundle of diag, or damaged"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_archive_that_pack_does_not_write_is_refused_where_it_begins_to_differ(name: str, tmp_path: Path) -> None:
    """In a Mebibyte of memory: what an archive claims is neither read nor reserved."""
    file = tmp_path / "foreign"
    file.write_bytes(zstandard.compress(ATTACKS[name][0]))
    with pytest.raises(BadRecording, match=ATTACKS[name][1]), bundle.unpacked(file):
        pass


def test_a_bundle_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle, "pack", full)
    (tmp_path / "link").symlink_to("elsewhere")
    for name, why in (("sick.tar.zst", "No space left"), ("link", "already exists")):
        refused = diag("bundle", str(KEPT / "engine_dead"), "-o", str(tmp_path / name))
        assert refused.returncode == 64 and why in refused.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["link"]


def test_a_bundle_that_is_too_large_is_neither_read_nor_written(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MOST_UNPACKED", 100_000)
    refused = diag("doctor", str(kept))
    assert refused.returncode == 64 and "its files take more than 0 MiB" in refused.stderr
    refused = diag("bundle", str(KEPT / "engine_dead"), "-o", str(tmp_path / "large.tar.zst"))
    assert refused.returncode == 64 and "a bundle holds 0 MiB: record a shorter time" in refused.stderr
    assert not [*tmp_path.iterdir()]


def test_a_file_that_exists_is_not_overwritten(kept: Path) -> None:
    again = diag("bundle", str(KEPT / "engine_dead"), "-o", str(kept))
    assert again.returncode == 64 and "already exists" in again.stderr


@pytest.mark.parametrize("content", ["[", "[]", '{"cpus": 8}'])
def test_facts_about_the_host_are_foreign(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "recording"
    shutil.copytree(KEPT / "engine_dead", folder)
    (folder / "host.json").write_text(content)
    done = diag("bundle", str(folder), "--issue")
    assert done.returncode == 0 and ("cpus: 8" in done.stdout) == ("cpus" in content)


def test_a_bundle_of_the_most_pods_can_be_unpacked() -> None:
    assert len(WHAT) + len(OF_A_POD) * MOST_PODS_KEPT < bundle.MOST_FILES
