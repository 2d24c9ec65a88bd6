"""`diag generate`: alerts, dashboards, runbooks and the metric reference, written or compared with what is there."""

from collections.abc import Sequence
from pathlib import Path

from diag.artefacts.generate import differences, files, write
from diag.commands.site import site


def run(
    root: Path, check: bool, folder: Path | None, contract_file: Path | None, only: Sequence[str] = ()
) -> tuple[str, int]:
    """Write the files, or only compare them; what to print and the exit status."""
    contract, incidents = site(folder, contract_file)
    texts = files(incidents, contract, only)
    if not check:
        changed = write(root, texts)
        return "\n".join([*changed, f"{root}: {len(texts)} files, {len(changed)} of them changed"]), 0
    outdated = [f"{name}: {difference}" for name, difference in differences(root, texts)]
    if outdated:
        return "\n".join(
            [*outdated, f"{root}: {len(outdated)} of {len(texts)} files are out of date; run diag generate"]
        ), 1
    return f"{root}: all {len(texts)} files are up to date", 0
