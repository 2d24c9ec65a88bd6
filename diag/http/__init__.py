"""Requests to a server: one client with one set of rules, over the standard library alone.

address        a target's URL in parts, redacted for display; which addresses belong to this host; credentials and TLS
client         the client: time and size limits, redirects, kept connections, proxies of the environment
failure        each way in which a request can fail, as the sentence that the user reads
vllm_server    a vLLM server over the client: its page, its API's facts, a probe
prometheus_api the APIs of Prometheus, as the session of prometheus-api-client, and of Alertmanager

docs/architecture.md says why it is http.client and no other library.
"""
