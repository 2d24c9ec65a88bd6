"""`diag generate`: alerts, dashboards and runbooks written, or compared with the declarations."""

from pathlib import Path

from diag.artefacts.generate import differences, files, write
from diag.core.contract_file import find
from diag.core.site_overrides import apply_overrides
from diag.knowledge.catalog import load


def run(root: Path, check: bool, folder: Path | None, contract: Path | None) -> tuple[str, int]:
    """Write alerts, dashboards and runbooks, or only compare them; what to print and the exit status."""
    settled = find(contract)
    texts = files(apply_overrides(load(folder), settled), settled)
    if not check:
        changed = write(root, texts)
        return "\n".join([*changed, f"{root}: {len(texts)} files, {len(changed)} of them changed"]), 0
    wrong = [f"{name}: {how}" for name, how in differences(root, texts)]
    if wrong:
        return "\n".join([*wrong, f"{root}: {len(wrong)} files disagree with the declarations: run diag generate"]), 1
    return f"{root}: all {len(texts)} files say what the declarations say", 0
