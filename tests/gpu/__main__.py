"""Record what this host's GPUs, their driver and a vLLM on them say, and compare it with what `diag` expects.

python -m tests.gpu [FOLDER]            record, judge, and write FOLDER.tar.gz, without secrets
python -m tests.gpu --judge FOLDER      judge a folder or an archive that was recorded elsewhere
"""

import argparse
import io
import os
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from diag.vllm.command.free_text import hidden_lines  # noqa: E402
from gpu import host, judge, server  # noqa: E402

MOST = 60 * 2**20
"""Bytes that an archive may have."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="folder to create (default: diag-gpu-TIME), or to judge")
    parser.add_argument("--judge", action="store_true", help="only judge what was recorded")
    parser.add_argument("--scripted", action="store_true", help="use the scripted libnvidia-ml instead of a card")
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="interpreter that has PyTorch")
    parser.add_argument("--vllm", default="", metavar="PYTHON", help="interpreter that has vLLM; without it, no server")
    parser.add_argument("--cpu", action="store_true", help="the vLLM is one for the CPU")
    parser.add_argument("--parts", default="abcd", help="which of the parts a, b, c and d to run")
    parser.add_argument("--quick", action="store_true", help="one server instead of three")
    parser.add_argument("--minutes", type=float, default=8, help="what does not fit is left out (default: 8)")
    options = parser.parse_args()
    if options.judge and not (options.folder and options.folder.exists()):
        parser.error("--judge needs a folder or an archive that exists")
    folder: Path = (options.folder or Path(time.strftime("diag-gpu-%Y%m%d-%H%M%S"))).absolute()
    os.chdir(ROOT)  # a diag.toml where the command is run judges that site's servers, not these
    if options.judge:
        return judge.print_table(folder)
    if folder.exists():
        parser.error(f"{folder} is there already")
    folder.mkdir(parents=True)
    begun = time.monotonic()
    host.record(folder, options.parts, options.torch, scripted=options.scripted)
    if "d" in options.parts and options.vllm:
        server.record(folder, options.vllm, begun + 60 * options.minutes, cpu=options.cpu, quick=options.quick)
    print(f"recorded in {time.monotonic() - begun:.0f} s", flush=True)
    failed = judge.print_table(folder)
    archive = pack(folder)
    size = archive.stat().st_size
    print(f"{archive}: {size / 2**20:.1f} MiB" + ", more than it should have" * (size > MOST))
    return failed or int(size > MOST)


def pack(folder: Path) -> Path:
    """Write a folder's archive: texts without secrets, addresses without passwords, ~ for a home folder."""
    archive = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            content = file.read_bytes()
            if file.suffix in (".log", ".txt"):
                lines = content.decode("utf-8", "replace").split("\n")  # no other character ends one
                content = "\n".join(hidden_lines(lines)).encode()
            entry = tarfile.TarInfo(str(Path(folder.name, file.relative_to(folder))))
            entry.size, entry.mtime = len(content), int(file.stat().st_mtime)
            tar.addfile(entry, io.BytesIO(content))
    return archive


if __name__ == "__main__":
    sys.exit(main())
