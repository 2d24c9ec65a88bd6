"""Signals that an incident file imports: all that are declared in diag/knowledge/signals/."""

from typing import TYPE_CHECKING

from diag.knowledge.signals import *  # noqa: F403

if TYPE_CHECKING:
    from diag.knowledge.signals import __getattr__  # noqa: F401
