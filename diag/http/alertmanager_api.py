"""The HTTP API of an Alertmanager: alerts are posted to it, as a Prometheus does it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from diag.core.errors import BadUsage, Unreachable
from diag.core.formatting import printable
from diag.http import failure
from diag.http.address import parse
from diag.http.client import Client, Manner, Response
from diag.http.credentials import from_environment
from diag.http.failure import Failure, Hints

PATH = "/api/v2/alerts"
OWN = "DIAG_ALERTMANAGER_"
"""What its credentials begin with in the environment: those of the servers are not sent to it."""
SECONDS = 10.0
_HINTS = Hints("is this the address of an Alertmanager, including its path (for example https://host/alertmanager)?")


class Alertmanager:
    """One Alertmanager; BadUsage where its address, or a credential, is none."""

    def __init__(self, url: str, environment: Mapping[str, str]) -> None:
        address = parse(url)
        if address.query:
            raise BadUsage(
                f"{address.shown}?...: leave out the question mark and what follows of an Alertmanager's URL"
            )
        own = {f"DIAG_{name.removeprefix(OWN)}": text for name, text in environment.items() if name.startswith(OWN)}
        try:
            self._client = Client(address, from_environment(own), Manner(SECONDS, _HINTS))
        except BadUsage as error:
            raise BadUsage(_own(str(error))) from error
        self._path = address.path.rstrip("/").removesuffix(PATH) + PATH
        self.shown = address.shown

    def post(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Post alerts in the form of the API; Unreachable, with one sentence, where they are not taken."""
        try:
            response = self._client.post(self._path, alerts, SECONDS)
            if response.status != 200:
                raise self._refusal(response)
        except Failure as error:
            raise Unreachable(_own(failure.sentence(self.shown, error))) from error

    def _refusal(self, response: Response) -> Failure:
        if response.status in (401, 403):
            return self._client.refusal(response.status)
        says = _sentence(response.body)
        return Failure(f"answered HTTP {response.status}{': ' if says else ''}{says}", "" if says else _HINTS.address)


def _sentence(body: bytes) -> str:
    """What an Alertmanager says of alerts that it refuses; "" where that is not what answered."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return printable(document, 200) if isinstance(document, str) else ""


def _own(sentence: str) -> str:
    return sentence.replace("DIAG_", OWN)
