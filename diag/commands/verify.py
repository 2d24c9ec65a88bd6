"""`diag verify`: a snapshot from before a change and one from after it, compared."""

import sys
from dataclasses import replace

from diag.commands.doctor import Format
from diag.commands.observe import ObserveOptions, take_snapshot, without_credentials
from diag.core.errors import BadUsage, Unreachable
from diag.core.files import exists
from diag.http.address import parse
from diag.report.verify import render, render_json, render_markdown
from diag.verify.compare import Verification, compare
from diag.verify.snapshot import Snapshot

EXIT = {"fixed": 0, "better": 1, "no effect": 1, "worse": 2, "not comparable": 3}


def verify(before: str, options: ObserveOptions) -> Verification:
    """Compare `before` with the targets of the options, or with the servers of `before` as they are now.

    Raises BadUsage where both are one and the same live server, Unreachable where one of them does not respond.
    """
    after = options.targets
    if not exists(before) and (not after or _identity(before) == _identity(after[0])):
        raise BadUsage(
            f"BEFORE must be a recording: {without_credentials([before])} is a live server, which cannot show its past;"
            " run diag record URL DIR before the change, and give DIR"
        )
    earlier = take_snapshot(replace(options, targets=[before], launch="", log=""))
    return compare(earlier, take_snapshot(options) if after else _now(earlier, options))


def _now(earlier: Snapshot, options: ObserveOptions) -> Snapshot:
    """The servers of a recording as they are now, at the addresses where it was made."""
    try:
        return take_snapshot(replace(options, targets=earlier.instances))
    except Unreachable as error:
        raise Unreachable(f"{error} BEFORE was recorded there: if the server has moved, give AFTER") from error


def _identity(target: str) -> str:
    """What a target is, however it was written: a path that exists is itself, a URL its host and port."""
    return target if exists(target) else parse(target).instance


def print_report(verification: Verification, form: Format) -> int:
    """Print a comparison on standard output; the exit status."""
    forms = {"terminal": render, "json": render_json, "markdown": render_markdown}
    sys.stdout.write(forms[form](verification))
    return EXIT[verification.verdict]
