"""`diag verify`: one look before a change and one after it, compared."""

import sys
from dataclasses import replace
from pathlib import Path

from diag.commands.doctor import Format
from diag.commands.observe import ObserveOptions, take_snapshot, without_credentials
from diag.core.errors import BadUsage, Unreachable
from diag.http.address import parse
from diag.report import verify as person
from diag.report import verify_json as machine
from diag.verify.compare import Verification, compare
from diag.verify.snapshot import Snapshot

EXIT = {"cured": 0, "better": 1, "no effect": 1, "worse": 2, "not comparable": 3}


def verify(before: str, settings: ObserveOptions) -> Verification:
    """Compare what was before a change with what the settings name, or with the servers of `before` as they are now.

    Raises BadUsage where both are one and the same live server, Unreachable where one of them does not answer.
    """
    after = settings.targets
    if not Path(before).exists() and (not after or _who(before) == _who(after[0])):
        raise BadUsage(
            f"BEFORE is no recording ({without_credentials([before])} would be asked), and a live server cannot show"
            " how it was: record it before the change with diag record URL DIR, and name DIR"
        )
    earlier = take_snapshot(replace(settings, targets=[before], launch="", log=""))
    return compare(earlier, take_snapshot(settings) if after else _now(earlier, settings))


def _now(earlier: Snapshot, settings: ObserveOptions) -> Snapshot:
    """The servers of a recording as they are now, asked where it was made."""
    try:
        return take_snapshot(replace(settings, targets=earlier.instances))
    except Unreachable as error:
        raise Unreachable(f"{error} BEFORE was recorded there: if it is elsewhere now, name AFTER") from error


def _who(target: str) -> str:
    """Who is asked, however it was written; a path of something that exists is itself."""
    return target if Path(target).exists() else parse(target).instance


def tell(found: Verification, form: Format) -> int:
    """Print a comparison on standard output; the exit status."""
    forms = {"terminal": person.terminal, "json": machine.render, "markdown": person.markdown}
    sys.stdout.write(forms[form](found))
    return EXIT[found.verdict]
