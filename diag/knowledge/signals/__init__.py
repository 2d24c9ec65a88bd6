"""All declared parts and signals; an incident file imports signals from diag.signals."""

import sys
from collections.abc import Callable, Mapping
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from diag.core.incident import Part, Signal
from diag.knowledge.signals.answers import *  # noqa: F403
from diag.knowledge.signals.expressions import *  # noqa: F403
from diag.knowledge.signals.features import *  # noqa: F403
from diag.knowledge.signals.forward_progress import *  # noqa: F403
from diag.knowledge.signals.gpu import *  # noqa: F403
from diag.knowledge.signals.kv_cache import *  # noqa: F403
from diag.knowledge.signals.load import *  # noqa: F403
from diag.knowledge.signals.log import *  # noqa: F403
from diag.knowledge.signals.peers import *  # noqa: F403
from diag.knowledge.signals.resources import *  # noqa: F403
from diag.knowledge.signals.startup import *  # noqa: F403
from diag.knowledge.signals.steps import *  # noqa: F403

_FILES = [vars(sys.modules[f"{__name__}.{file.name}"]) for file in iter_modules(__path__)]  # noqa: F405
DECLARED: Mapping[str, Part | Signal] = {
    declared.id: declared
    for file in _FILES
    for of_file in (file.get("PARTS", ()), file["SIGNALS"].values(), file.values())
    for declared in of_file
    if isinstance(declared, Part | Signal)
}
"""Every part and signal, by its name in expressions."""
for _file in _FILES:
    globals().update(_file["SIGNALS"])

if TYPE_CHECKING:
    __getattr__: Callable[[str], Signal]
