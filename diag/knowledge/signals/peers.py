"""Signals that compare with peers: an engine with the others of its model, a rank with the others of its engine.

The peers of an engine are all engines, itself included, that serve the same model name in the same job, namespace and
part of the site (such as its cluster): replicas, or the data-parallel ranks of one replica. Staging is no peer of
production. A peer counts if it has three samples in the window. With three or more engines the median shows
what is usual; with two, the other engine does.
"""

from diag.core.incident import GROUP, judged
from diag.core.log_events import EXPERT_BALANCE, SHM_BROADCAST_WAIT
from diag.knowledge.signals.expressions import USUAL_MEMBER, declared
from diag.knowledge.signals.log import lately

OF_MODEL = f"{', '.join(GROUP)}, model_name"
MODEL = f"{OF_MODEL}, role"
PEERS = f"by ({MODEL})"
"""The grouping in every expression over peers."""
AT_WORK = 0.25
"""Share of its power limit above which a GPU at full utilisation computes."""
STILL, SPINS = 0.05, 0.8
"""CPU cores: a worker below the first stands still, a worker above the second busy-waits or computes."""
BY_RANK = "0[.]3[2-9].*|0[.][4-9][0-9].*|[1-9][0-9]*[.].*"
"""Releases of vLLM that log the balance of ranks; before, EPLB compared the layers of each rank (vllm#51784)."""
WAITS = f"time_of_{SHM_BROADCAST_WAIT}"
FEWEST_BALANCES = 3
DECODES = 0.9
"""Share of all prompt tokens from a KV connector above which a server decodes: the prefill server computed them."""
MUCH_SLOWER, LATER, FEWEST_TOKENS = 3, 1.5, 100
"""How many times the peers' mean time per token: a larger batch alone costs less than the first; of so many tokens."""
SPIN_OF_WORK, SPIN_OF_LIMIT = 0.6, 0.4
"""Shares of power below which a busy GPU busy-waits."""


def _by_role(of_model: str) -> str:
    """Return an expression over engines with the label of their part in disaggregated serving."""
    return f"({of_model}) * on (instance) group_left (role) $roles[5m]"


def _tokens_of_ranks(field: str) -> str:
    """Return the sum of a number of tokens in EPLB's lines; each line adds up the MoE layers of one step."""
    return f'sum by ($by) (increase(diag_vllm_log_value_total{{event="{EXPERT_BALANCE}",field="{field}"}}[$window]))'


def _usual(part: str) -> str:
    """Return the part usual_PART, for each engine the median of all, or the value of the other one if there are two.

    The median of two is their mean: twice it, less the engine's own value, is the value of the other.
    """
    return f"""
    usual_{part} ({USUAL_MEMBER}) =
        -1 * ${part} * on ({MODEL}) group_left () $are_two[5m]
        + on ({MODEL}) group_left () (1 + $are_two[5m]) * quantile {PEERS} (0.5, ${part})
    """


PARTS, SIGNALS = declared(
    vars(),
    f"""
    # vLLM repeats the line every 60 s; at a start it tells of ranks that compile
    log_waits_for_a_rank: bool = {lately(WAITS, 120)} * (${WAITS} >= bool $last_startup_progress or 1 + 0 * ${WAITS})
    """,
    *map(_usual, ("load_of_model", "load_at_scrape", "waiting_of_model", "output_tokens_of_model")),
    *map(_usual, ("prompt_tokens_of_model", "kv_cache_of_model", "itl_of_model")),
)


overloaded = SIGNALS["tokens_of_peers"].at_least(
    1, judged("an overloaded replica generates no fewer tokens than its peers, a slow one does")
)
slower_than_peers = overloaded.opposite
balanced = SIGNALS["load_of_peers"].at_most(2, judged("a smaller imbalance may be chance: requests differ in length"))
"""It holds for a server without peers too: it is its own median."""
