"""Record what this host's GPUs, their driver and a vLLM on them say, and compare it with what `diag` expects.

python -m tests.gpu FOLDER              record, judge, and write FOLDER.tar.gz
python -m tests.gpu --judge FOLDER      judge a folder or an archive that was recorded elsewhere
"""

import argparse
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from gpu import host, judge, server  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to create, or to judge")
    parser.add_argument("--judge", action="store_true", help="only judge what was recorded")
    parser.add_argument("--scripted", action="store_true", help="use the scripted libnvidia-ml instead of a card")
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="interpreter that has PyTorch")
    parser.add_argument("--vllm", default="", metavar="PYTHON", help="interpreter that has vLLM; without it, no server")
    parser.add_argument("--cpu", action="store_true", help="the vLLM is one for the CPU")
    parser.add_argument("--parts", default="abcd", help="which of the parts a, b, c and d to run")
    parser.add_argument("--quick", action="store_true", help="one server instead of three")
    options = parser.parse_args()
    folder: Path = options.folder
    if options.judge:
        return judge.print_table(folder)
    folder.mkdir(parents=True)
    begun = time.monotonic()
    host.record(folder, options.parts, options.torch, scripted=options.scripted)
    if "d" in options.parts and options.vllm:
        server.record(folder, options.vllm, cpu=options.cpu, quick=options.quick)
    print(f"recorded in {time.monotonic() - begun:.0f} s", flush=True)
    failed = judge.print_table(folder)
    archive = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")
    return failed


if __name__ == "__main__":
    sys.exit(main())
