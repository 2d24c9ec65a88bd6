"""What an incident file imports: every signal that is declared. (They live in diag/knowledge/signals/.)"""

from diag.knowledge.signals.engine import *  # noqa: F403
from diag.knowledge.signals.features import *  # noqa: F403
from diag.knowledge.signals.gpu import *  # noqa: F403
from diag.knowledge.signals.host import *  # noqa: F403
from diag.knowledge.signals.peers import *  # noqa: F403
