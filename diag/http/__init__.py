"""Requests to a server: one client with one set of rules, over the standard library alone.

address        a target's URL in parts; what of it may be printed
credentials    headers and TLS context, from the environment and from files
proxy          which proxy the environment names for an address
client         the client: limits of time and size, redirects, kept connections
background     threads that nobody has to wait for
gunzip         decompression in small steps
failure        what goes wrong, in words: one table for all of it
vllm_server    a vLLM server over the client: its page, what it reports of itself, a probe
prometheus_api the API of a Prometheus over the client, as the session of prometheus-api-client
locality       whether an address is one of this host

Why http.client and no other library (300 scrapes of a page of 110 kB on loopback, Python 3.11, medians): this client
takes 0.25 ms of CPU a scrape over a kept connection and 0.6 ms over a new one; httpx 0.6 and requests 0.7 ms, kept or
not. The exporter has 1 ms in all for what it adds to vLLM's page, so http.client is needed in any case. To import the
client takes 40 ms of CPU, httpx 105 and requests 85: without httpx the doctor starts 130 ms earlier and the exporter
needs 8 MiB less. prometheus-api-client imports requests, but takes a session of ours, which needs none of it.
"""
