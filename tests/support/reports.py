"""Reports as goldens keep them: one more incident in the catalogue changes no golden but its own."""

import json
import re
from functools import cache
from pathlib import Path

from diag.commands import doctor
from diag.commands.observe import ObserveOptions, look, site
from diag.diagnosis.report import Report
from diag.report import json as as_json

_LISTS = re.compile(r"\n {19}(?:absent|need more telemetry): .*(?:\n {19}.*)*|\n  Not judged .*(?:\n {19}.*)*")
_COUNTS = re.compile(r"\(\d+\s+checked\s+on\s+[\d,]+\s+servers?(?:;\s+\d+\s+needs?\s+more\s+telemetry)?\)")


@cache
def judged(name: str) -> Report:
    """The report of a recording, judged once for all tests of a process."""
    return doctor.run(ObserveOptions([f"tests/recordings/{name}"]))


def uncounted(text: str) -> str:
    """A report without how many and which incidents are not present: both grow with the catalogue."""
    return _COUNTS.sub("(N checked)", _LISTS.sub("", text))


def present_only(report: Report) -> str:
    """The JSON report without the incidents that are absent or unknown, and without diag's version."""
    document = json.loads(as_json.render(report))
    del document["observed"]["judged"]["incidents"]
    for answer in document["answers"]:
        answer["sentences"] = [uncounted(sentence) for sentence in answer["sentences"]]
    present = [diagnosis for diagnosis in document["diagnoses"] if diagnosis["state"] == "present"]
    return json.dumps({**document, "diag": "VERSION", "diagnoses": present}, indent=1, ensure_ascii=False) + "\n"


def judged_logs(*targets: Path | str, **options: str) -> Report:
    """The report on logs alone, whose times are of UTC."""
    contract, incidents = site(None, None)
    chosen = ObserveOptions([str(target) for target in targets], log_timezone="UTC", **options)  # type: ignore[arg-type]
    return look(chosen, contract, incidents).report
