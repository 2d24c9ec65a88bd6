"""Signals that an incident file imports: all that are declared in diag/knowledge/signals/."""

from diag.knowledge.signals import *  # noqa: F403
