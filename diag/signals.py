"""What an incident file imports: every signal that is declared, from diag/knowledge/signals/."""

from diag.knowledge.signals import *  # noqa: F403
