"""Files that are written whole or not at all."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diag.core.errors import BadUsage
from diag.core.files import only_writer, written_whole


def test_a_file_is_replaced_once_all_of_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("old")
    file.chmod(0o640)
    with written_whole(file) as out:
        out.write("new")
        out.flush()
        assert file.read_text() == "old"
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o640)
    assert list(tmp_path.iterdir()) == [file]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    with pytest.raises(KeyboardInterrupt), written_whole(tmp_path / "f") as out:
        out.write("new")
        raise KeyboardInterrupt
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "goal").write_text("old")
    (tmp_path / "link").symlink_to("goal")
    with written_whole(tmp_path / "link") as out:
        out.write("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "goal").read_text() == "new"


def test_a_device_is_written_and_not_replaced() -> None:
    with written_whole(Path(os.devnull)) as out:
        out.write("new")
    assert Path(os.devnull).is_char_device()


MOUNTED = """
mount --bind mounted alone
"$0" -c 'import pathlib, diag.core.files as w
with w.written_whole(pathlib.Path("alone")) as out: print("new", file=out)'
"""


def test_a_file_that_is_mounted_alone_is_written_in_place(tmp_path: Path) -> None:
    """A container may mount one file of its host: the file cannot be replaced."""
    for name in ("mounted", "alone"):
        (tmp_path / name).write_text("an old and longer text")
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], check=False).returncode:
        pytest.skip("no mount namespace may be made here")
    subprocess.run([*namespace, "sh", "-ec", MOUNTED, sys.executable], cwd=tmp_path, check=True)
    assert (tmp_path / "mounted").read_text() == "new\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["alone", "mounted"]


def test_a_full_disk_is_an_error_and_not_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"), written_whole(tmp_path / "full") as out:
        out.write("new")


def test_no_planted_link_is_written_and_two_writers_do_not_mix(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "f"
    victim.write_text("untouched")
    (tmp_path / ".f.tmp").symlink_to(victim)
    with written_whole(file) as first, written_whole(file) as second:
        first.write("first")
        second.write("second")
    assert (victim.read_text(), file.read_text()) == ("untouched", "first")


def test_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    with only_writer(tmp_path), pytest.raises(BadUsage, match="another diag is writing to"), only_writer(tmp_path):
        pass
    with only_writer(tmp_path):
        pass


WRITER = """
import sys
from itertools import count
from pathlib import Path
from diag.core.files import only_writer, written_whole
with only_writer(Path(sys.argv[1])):
    for turn in count():
        with written_whole(Path(sys.argv[1], f"{turn % 3}")) as out:
            for _ in range(20):
                out.write(f"{turn}\\n" * 1000)
                out.flush()
        print(turn, flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_writer_that_is_killed_at_any_moment_leaves_whole_files_and_no_lock(
    tmp_path: Path, how: signal.Signals
) -> None:
    chance = random.Random(1)
    for _ in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            while process.stdout and process.stdout.readline() != "2\n":
                pass
            time.sleep(chance.uniform(0, 0.02))
            process.send_signal(how)
        texts = [(tmp_path / name).read_text() for name in "012"]
        assert [len(set(text.splitlines())) for text in texts] == [1, 1, 1]
        assert [text.count("\n") for text in texts] == [20_000] * 3
