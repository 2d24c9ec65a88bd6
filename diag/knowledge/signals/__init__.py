"""Every signal that is declared; an incident file imports them from diag.signals."""

from diag.knowledge.signals.ceilings import *  # noqa: F403
from diag.knowledge.signals.expressions import *  # noqa: F403
from diag.knowledge.signals.features import *  # noqa: F403
from diag.knowledge.signals.forward_progress import *  # noqa: F403
from diag.knowledge.signals.gpu import *  # noqa: F403
from diag.knowledge.signals.halted import *  # noqa: F403
from diag.knowledge.signals.host import *  # noqa: F403
from diag.knowledge.signals.kv_cache import *  # noqa: F403
from diag.knowledge.signals.kv_connector import *  # noqa: F403
from diag.knowledge.signals.load import *  # noqa: F403
from diag.knowledge.signals.multimodal import *  # noqa: F403
from diag.knowledge.signals.peers import *  # noqa: F403
from diag.knowledge.signals.prefill import *  # noqa: F403
from diag.knowledge.signals.ranks import *  # noqa: F403
from diag.knowledge.signals.resources import *  # noqa: F403
from diag.knowledge.signals.settings import *  # noqa: F403
from diag.knowledge.signals.slo import *  # noqa: F403
from diag.knowledge.signals.startup import *  # noqa: F403
from diag.knowledge.signals.upgrades import *  # noqa: F403
