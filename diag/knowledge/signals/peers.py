"""Signals that compare with peers: an engine with the others of its model, a rank with the others of its engine.

The peers of an engine are all engines, itself included, that serve the same model name in the same job, namespace and
part of the site (such as its cluster): replicas, or the data-parallel ranks of one replica. Staging is no peer of
production. A peer counts if it has three samples in the window. With three or more engines the median shows
what is usual; with two, the other engine does.
"""

from diag.core.incident import GROUP, judged
from diag.core.log_events import EXPERT_BALANCE, SHM_BROADCAST_WAIT
from diag.knowledge.signals.expressions import declared
from diag.knowledge.signals.log import lately

MODEL = f"{', '.join(GROUP)}, model_name"
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
SPIN_OF_WORK, SPIN_OF_LIMIT = 0.6, 0.4
"""Shares of power below which a busy GPU busy-waits."""


def _beside_peers(own: str, operator: str, other: str, of_all: str) -> str:
    """Return an engine's own value, an operator, and the value of the other of two engines, or the aggregate of all.

    `own`, `other` and `of_all` keep the label of the model until they are joined.
    """
    return f"max by ($by) ({own} {operator} {other} or {own} {operator} on ({MODEL}) group_left () {of_all})"


def _tokens_of_ranks(field: str) -> str:
    """Return the sum of a number of tokens in EPLB's lines; each line adds up the MoE layers of one step."""
    return f'sum by ($by) (increase(diag_vllm_log_value_total{{event="{EXPERT_BALANCE}",field="{field}"}}[$window]))'


def _of_the_other(part: str) -> str:
    """Return the part PART_of_the_other, the value of the other engine if there are two."""
    both = f"(sum {PEERS} (${part}) and count {PEERS} (${part}) == 2)"
    return f"{part}_of_the_other = -1 * (${part} - on ({MODEL}) group_left () {both})"


PARTS, SIGNALS = declared(
    vars(),
    f"""
    # vLLM repeats the line every 60 s; at a start it tells of ranks that compile
    log_waits_for_a_rank: bool = {lately(WAITS, 120)} * (${WAITS} >= bool $last_startup_progress or 1 + 0 * ${WAITS})
    """,
    *map(_of_the_other, ("load_of_model", "load_at_scrape", "waiting_of_model", "output_tokens_of_model")),
    _of_the_other("token_counts_of_model"),
)


overloaded = SIGNALS["tokens_of_peers"].at_least(
    1, judged("an overloaded replica generates no fewer tokens than its peers, a slow one does")
)
slower_than_peers = overloaded.opposite
balanced = SIGNALS["load_of_peers"].at_most(2, judged("a smaller imbalance may be chance: requests differ in length"))
"""It holds for a server without peers too: it is its own median."""
