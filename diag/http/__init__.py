"""Requests to a server: one client with one set of rules, over the standard library alone.

address        a target's URL in parts, redacted for display; which addresses belong to this host; credentials and TLS
client         the client: time and size limits, redirects, kept connections, proxies of the environment
failure        each way in which a request can fail, as the sentence that the user reads
vllm_server    a vLLM server over the client: its page, its API's facts, a probe
prometheus_api the APIs of Prometheus, as the session of prometheus-api-client, and of Alertmanager

Why http.client and no other library (Python 3.11, two cores, 300 scrapes of a 110 kB page on loopback): the client
takes 0.25 ms of CPU a scrape over a kept connection and 0.6 ms over a new one; httpx takes 0.6 ms and requests 0.7 ms,
kept or not. The exporter may add 1 ms in all to a scrape of vLLM, so it needs the kept connection of http.client in
any case. Importing the client takes 90 ms of CPU; over httpx it took 150 ms, over requests 135 ms. With one client for
all, the imports of the live doctor take 315 ms instead of 440 ms, and those of the exporter 29 MiB instead of 37 MiB.
prometheus-api-client imports requests itself, but accepts any session: ours sends with this client.
"""
