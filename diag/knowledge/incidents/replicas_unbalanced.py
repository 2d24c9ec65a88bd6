"""One replica or data-parallel rank receives far more load than its peers: its requests queue, theirs do not."""

from diag import signals
from diag.incident import Effect, Fix, Incident, LookAlike, documented, judged

DATA_PARALLEL = "https://docs.vllm.ai/en/latest/serving/data_parallel_deployment/"

UNBALANCED = signals.balanced.opposite
incident = Incident(
    id="replicas_unbalanced",
    title="Load imbalance between replicas",
    severity="warning",
    per=("instance", "engine"),
    hold="2m",  # thermal throttling, one of its causes, is detected no sooner
    cause="""
        A load balancer that ignores the load of each replica sends this one more than it can serve. Round robin does so
        because requests differ in length by orders of magnitude; sticky sessions, hashing or a hot prefix do so because
        a few clients are most of the load. The queue of this replica grows while its peers have capacity, and no mean
        over the fleet shows it.
    """,
    impact="TTFT rises on this replica, while its peers could serve at once",
    symptoms=(
        UNBALANCED,
        signals.load_beyond_peers.at_least(4, judged("one or two extra long requests are chance, whatever the ratio")),
        signals.requests_waiting_median.at_least(1, judged("an imbalance has no impact until requests wait")),
    ),
    supports=(signals.overloaded,),
    looks_like=(
        LookAlike(
            "a fleet that is too small",
            distinguish="Requests queue on its peers too, and most of them report queue_saturation: add a replica.",
            requires=signals.peers_waiting.below(
                1, judged("where requests wait on most peers, no peer has capacity to spare")
            ),
        ),
        LookAlike(
            "a standby",
            distinguish="Of two replicas, one may be idle on purpose: it generates no tokens.",
            requires=signals.peers.at_least(
                2, judged("an engine without a peer that generates tokens is compared with none")
            ),
        ),
        LookAlike(
            "a slow replica",
            distinguish="It receives no more load than its peers and generates fewer tokens: heat, other hardware, "
            "other flags, or preemptions.",
            refuted_by=signals.overloaded,
        ),
        LookAlike(
            "engine_stalled",
            distinguish="The replica makes no progress at all: every request sent to it stays in flight.",
        ),
        LookAlike(
            "gpu_thermal_throttling",
            distinguish="Its GPU is hot and slow, but it receives no more load than its peers.",
        ),
        LookAlike(
            "servers with a different role",
            distinguish="All servers with the same model name in one job, namespace and cluster (the labels of "
            "diag.toml's [site]) count as peers, including prefill servers. Give those another --served-model-name.",
        ),
    ),
    explains=("queue_saturation", "contract_breached"),
    may_explain=(
        Effect("kv_eviction_cascade", where=(signals.overloaded,)),
        Effect("kv_pool_saturated", where=(signals.overloaded,)),
        Effect("kv_pool_undersized", where=(signals.overloaded,)),
    ),
    ended_by=signals.requests_waiting_median,
    sign=signals.sign_of_imbalance,
    fixes=(
        Fix.without_restart(
            change="Balance by the load of each replica (fewest outstanding requests, or queue length and KV cache "
            "usage) instead of round robin or random choice.",
            effect="requests above the median of its peers fall; no request waits while another replica has capacity",
            why=documented("balance by scheduled and waiting requests and by the state of the KV cache", DATA_PARALLEL),
        ),
        Fix.without_restart(
            change="Find what pins clients to this replica: session affinity, a hash over a few keys, or long-lived "
            "connections that are balanced only when opened. Choose the replica for every request.",
            effect=f"{UNBALANCED.signal.name} falls below {UNBALANCED.limit_with_unit}",
            risk="a conversation that moves to another replica misses the prefix cache there",
            why=judged("a few large clients often are most of the load"),
        ),
        Fix.without_restart(
            change="If the router prefers the replica that has the prefix cached, make it consider the queue length "
            "too: a shared system prompt would send all requests to one replica.",
            effect="the hot prefix is cached on several replicas, and their load evens out",
            risk="every replica computes the prefix once, and other prefixes have less room",
            why=judged("a cache hit saves one prefill, a queue costs many"),
        ),
        Fix.without_restart(
            change="Between data-parallel ranks, check which component balances: vLLM balances by the queues of all "
            "ranks; with --data-parallel-hybrid-lb only by those of its node; with --data-parallel-external-lb, or "
            "with a port per rank, not at all, and the load balancer in front has to do it.",
            effect="the load of the ranks evens out",
            only_if=(
                signals.running_value("data_parallel_size").above(
                    1, documented("it is the number of data-parallel ranks", DATA_PARALLEL)
                ),
            ),
            why=documented("vLLM has internal, hybrid and external load balancing", DATA_PARALLEL),
        ),
    ),
    operations=("drain",),
    mitigate=(
        "Send this replica fewer requests, or none until its queue is empty, at the load balancer; a data-parallel "
        "rank at what assigns requests to ranks: fewer requests for its server would leave its peers idle.",
    ),
    hand_over=(
        "the load balancer's policy, weights and affinity, the requests it sent to each replica in the last hour, and "
        "the launch commands of this replica and of a peer",
    ),
    do_not=(
        "Do not add a replica: there is unused capacity already, and a new replica would not be used either.",
        "Do not restart it: it comes back with an empty prefix cache and the same share of the requests.",
    ),
)
