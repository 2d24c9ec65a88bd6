"""Dumps of PyTorch's flight recorder: the last collectives of a rank, which its watchdog writes when one times out.

A dump is a pickle, which runs code of its author when it is read: diag looks at the names and times of files only.
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

MOST_FILES = 4096
"""Entries of a folder that are looked at: a dump may be in /tmp."""
_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_RANK = re.compile(r"\d{1,6}", re.ASCII)


def dump_prefixes(environment: Mapping[str, str]) -> Sequence[str]:
    """Return the beginnings of the dumps' paths, to which PyTorch adds the rank; a variable replaces the defaults."""
    given = next(filter(None, map(environment.get, _VARIABLES)), "")
    cache = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '/tmp')}/.cache"  # as PyTorch falls back
    prefixes = [given] if given else [f"{cache}/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"]
    return [prefix for prefix in prefixes if prefix.startswith("/") and "\0" not in prefix]


def newest_dump(prefixes: Sequence[str], since: float, root: Path = Path("/")) -> float:
    """Return the unix time at which the newest dump after `since` was written; 0 if there is none."""
    times: list[float] = []
    for prefix in prefixes:
        folder, _, name = prefix.rpartition("/")
        try:
            with os.scandir(root / folder.lstrip("/")) as entries:
                times += [
                    entry.stat(follow_symlinks=False).st_mtime
                    for entry in islice(entries, MOST_FILES)
                    if entry.name.startswith(name)
                    and _RANK.fullmatch(entry.name[len(name) :])
                    and entry.is_file(follow_symlinks=False)
                ]
        except OSError:
            continue
    return max((at for at in times if at >= since), default=0.0)
