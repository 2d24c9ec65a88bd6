"""HTTP routes of vLLM's API server at which clients ask for inference, vLLM 0.8 - 0.33."""

import re

GENERATING_ROUTES = "|".join(
    (
        "/v1/(completions|chat/completions(/batch|)|responses|messages|systemone|audio/trans(criptions|lations))",
        "/cohere/v2/chat|(/inference/v1|)/generate|/invocations|/generative_scoring",
    )
)
"""Routes whose requests generate tokens; /v1/realtime is a websocket, which is not counted."""
POOLING_ROUTES = "/v1/embeddings|/v1/decisions|/v2/embed|/pooling|/classify|(/v1|)/score|(/v1|/v2|)/rerank"
"""Routes of embedding, scoring and classifying models; one answer may be many requests of the engine."""
MANAGING = re.compile(
    "/(wake_up|sleep|collective_rpc|pause|resume|update_weights|scale_elastic_ep|v1/(un)?load_lora_adapter)"
)
"""Routes at which an operator changes the server."""
_SERVED = re.compile(f"{GENERATING_ROUTES}|{POOLING_ROUTES}")
_MEANT = re.compile(
    r"(?:/[^/]{1,60}){0,4}/(?:(?:chat/)?completions|responses|messages|embeddings|embed|pooling|classify|score|rerank"
    r"|generate|chat|audio/(?:transcriptions|translations))/?"
)
"""A path that ends as a route of inference does: behind a wrong base URL, or in front of one that a proxy removes."""


def is_served(path: str) -> bool:
    """Return True for a route of inference."""
    return bool(_SERVED.fullmatch(path))


def asks_for_inference(method: str, path: str) -> bool:
    """Return True if a request is one of a client that wants inference, also at a path that vLLM does not serve.

    A GET or HEAD is a probe, a scanner or a browser, an OPTIONS the preflight of a browser.
    """
    return method == "POST" and bool(_SERVED.fullmatch(path) or _MEANT.fullmatch(path))
