"""One replica or data-parallel rank is sent far more than its peers: its requests wait while the others have room."""

from diag.incident import Fix, Incident, LookAlike, documented, judged
from diag.signals import (
    load_beyond_peers,
    load_of_peers,
    peers,
    peers_waiting,
    requests_waiting_median,
    running_value,
    tokens_of_peers,
)

DATA_PARALLEL = "https://docs.vllm.ai/en/latest/serving/data_parallel_deployment/"

WRITES = tokens_of_peers.at_least(1, judged("who is sent too much writes no less than its peers, who is slow does"))
incident = Incident(
    id="replicas_unbalanced",
    title="One replica holds far more requests than its peers",
    severity="warning",
    per=("instance", "engine"),
    hold="2m",  # a GPU that is too hot, which is a cause of it, is known no sooner
    cause="""
        A balancer that does not see what each replica holds sends this one more than it serves: round robin, for
        requests differ in length by orders of magnitude; sticky sessions, a hash or a hot prefix, for a few clients are
        most of the load. Its queue grows while its peers have room, and no mean over the fleet shows it.
    """,
    impact="whoever is sent here waits for the first token, while its peers would have served at once",
    symptoms=(
        load_of_peers.above(2, judged("less may be chance: requests differ in length")),
        load_beyond_peers.at_least(4, judged("one or two long requests more are chance, whatever the ratio")),
        requests_waiting_median.at_least(1, judged("an uneven load harms nobody until somebody waits")),
    ),
    supports=(WRITES,),
    looks_like=(
        LookAlike(
            "a fleet that is too small",
            distinguish="There, its peers wait as well, and queue_saturation is found on most of them: add a replica.",
            requires=peers_waiting.below(1, judged("where most of the peers wait, none has room for more")),
        ),
        LookAlike(
            "a fleet of two",
            distinguish="Two have no median that tells which one is off, and where one idles on purpose the other is "
            "not ill.",
            requires=peers.at_least(3, judged("of three, two that agree show the third")),
        ),
        LookAlike(
            "a slow replica",
            distinguish="It is sent no more than its peers and does less: heat, other hardware, other flags, "
            "evictions.",
            refuted_by=WRITES,
        ),
        LookAlike("engine_stalled", distinguish="There, it does not move at all: every request sent to it stays."),
        LookAlike(
            "gpu_thermal_throttling", distinguish="There, its GPU is hot and slow: it is not sent more than its peers."
        ),
        LookAlike(
            "a pool of another kind",
            distinguish="Whatever serves a model of the same name is taken for a peer: a pool for prefill or for "
            "tests, too. --served-model-name tells them apart.",
        ),
    ),
    explains=("queue_saturation", "contract_breached"),
    fixes=(
        Fix(
            change="Have the balancer go by what each replica holds: the fewest outstanding requests, or its queue "
            "and its KV usage, instead of round robin or chance.",
            effect="requests above the median of its peers fall, and nobody waits while another replica has room",
            restart=False,
            why=documented("balance by scheduled and waiting requests and the state of the KV cache", DATA_PARALLEL),
        ),
        Fix(
            change="Look for what pins clients to it: session affinity, a hash over a few keys, connections that are "
            "balanced when they are opened and then kept. Choose the replica anew for each request.",
            effect="requests / median of its peers falls below 2",
            risk="a conversation that moves finds no prefix in the cache of its new replica",
            restart=False,
            why=judged("a few large clients are most of the load"),
        ),
        Fix(
            change="Where the router sends a prefix to the replica that has it in its cache, let the queue count as "
            "well: a system prompt that all share sends all to one.",
            effect="the hot prefix is cached on several replicas, and their loads become alike",
            risk="each replica computes the prefix once, and other prefixes have less room",
            restart=False,
            why=judged("a hit saves a prefill, a queue costs many"),
        ),
        Fix(
            change="Between data-parallel ranks, see who balances: vLLM goes by the queues of all ranks; with "
            "--data-parallel-hybrid-lb only by those of its node, and with --data-parallel-external-lb, or ranks with "
            "ports of their own, not at all. Then the balancer in front has to.",
            effect="the ranks' loads become alike",
            restart=False,
            only_if=(
                running_value("data_parallel_size").above(1, documented("the number of the ranks", DATA_PARALLEL)),
            ),
            why=documented("internal, hybrid and external load balancing", DATA_PARALLEL),
        ),
    ),
    mitigate=("Lower its weight at the balancer, or send nothing new there until its queue is gone.",),
    hand_over=(
        "the balancer's policy, weights and affinity, how many requests it sent to each replica in the last hour, and "
        "the launch command of this replica beside that of a peer",
    ),
    do_not=(
        "Do not add a replica: there is room already, and it would not be used either.",
        "Do not restart it: it comes back with an empty cache, to the same share of the requests.",
    ),
)
