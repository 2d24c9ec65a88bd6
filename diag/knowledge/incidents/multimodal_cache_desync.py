"""The API server's and the engine's multimodal caches disagree: requests fail, or never reach the scheduler."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported

CACHING = "https://docs.vllm.ai/en/latest/configuration/optimization.html"
DEAD_THREAD = "https://github.com/vllm-project/vllm/issues/31404"
LOOPS = "https://github.com/vllm-project/vllm/issues/43941"

UNREACHED = signals.requests_unreached.at_least(
    1, reported("the input thread hangs or has died, and every later request hangs", DEAD_THREAD)
)
incident = Incident(
    id="multimodal_cache_desync",
    title="Multimodal cache desynchronized",
    severity="warning",
    per=("instance",),
    window="1m",
    live_window="15s",
    cause="""
        The API server keeps processed images, audio and video in a cache, and sends the engine only the hash of an item
        that the engine's own cache should have. If the two caches drift apart (a request that was refused after it was
        cached, an eviction in another order, several API servers), the engine lacks the item. Depending on the release,
        that request fails with HTTP 500, or the engine's input thread ends or loops for ever: then no request, with or
        without an image, reaches the scheduler, and the gauges show an idle server.
    """,
    impact="requests with an item that was seen before fail; in the worst case every request hangs",
    symptoms=(
        signals.multimodal_cache_lost.at_least(
            1, measured("the log names the lost item with each failed request", "multimodal_cache_desync")
        ),
    ),
    supports=(
        UNREACHED,
        signals.failed_before_the_scheduler.above(
            0, measured("the engine fails the request before the scheduler sees it", "multimodal_cache_desync")
        ),
    ),
    escalates=UNREACHED,
    looks_like=(
        LookAlike(
            "a cache miss that heals itself",
            distinguish="Recent releases log a warning (Multi-modal cache miss for request) and have the client send "
            "the item again: nothing else is needed.",
        ),
        LookAlike(
            "structured_output_failing",
            distinguish="It also fails requests before the scheduler sees them; the log names a grammar, no mm_hash.",
        ),
        LookAlike(
            "engine_stalled",
            distinguish="An engine that hangs in a step shows requests running; here the gauges show none.",
        ),
    ),
    explains=("engine_stalled", "engine_dead", "requests_failing", "contract_breached"),
    fixes=(
        Fix(
            change="Restart the server: the two caches agree again only when both are empty.",
            effect="requests reach the scheduler again",
            while_it_lasts=True,
            why=reported("after the first lost item, eviction may loop for ever", LOOPS),
        ),
        Fix(
            flag="--mm-processor-cache-gb",
            value=0,
            least=0,
            change="Turn the multimodal processor cache off until the release is upgraded.",
            effect="every request carries its items, so that no cache can lack one",
            risk="repeated images are processed again: more CPU time in the API server, and a longer TTFT",
            rollback="--mm-processor-cache-gb 4 (the default)",
            why=documented("0 disables the cache in both processes", CACHING),
        ),
        Fix(
            change="Upgrade vLLM: recent releases answer a lost item with a request to send it again.",
            effect="a drift of the caches costs one retry",
            why=judged("vLLM 0.32 handles MultiModalCacheMissError so; 0.11 ends its input thread"),
        ),
    ),
    operations=("drain", "restart"),
    mitigate=(
        "Take the server out of rotation while requests hang: /health keeps answering 200.",
        "Have clients retry on another replica: another one's caches are not affected.",
    ),
    hand_over=(
        "the log from the first `Expected a cached item for mm_hash=` on, the stack traces of the API server and of "
        "EngineCore (py-spy dump), and the requests that were refused with 400 before it",
    ),
    do_not=("Do not trust gauges at 0: they count what has reached the scheduler.",),
)
