"""Requests to a server: one client with one set of rules, over the standard library alone.

address        a target's URL in parts; what of it may be printed
credentials    headers and TLS context, from the environment and from files
proxy          which proxy the environment names for an address
client         the client: what is sent, limits of size, redirects, kept connections
deadline       limits of time: for each wait, and for a whole response
background     threads that nobody has to wait for
gunzip         decompression in small steps
failure        what goes wrong, in words: one table for all of it
vllm_server    a vLLM server over the client: its page, what it reports of itself, a probe
prometheus_api the API of a Prometheus over the client, as the session of prometheus-api-client
locality       whether an address is one of this host

Why http.client and no other library (Python 3.11, two cores, 300 scrapes of a 110 kB page on loopback): the client
takes 0.25 ms of CPU a scrape over a kept connection and 0.6 ms over a new one; httpx takes 0.6 ms and requests 0.7 ms,
kept or not. The exporter may add 1 ms in all to a scrape of vLLM, so it needs the kept connection of http.client in
any case. Importing the client takes 90 ms of CPU; over httpx it took 150 ms, over requests 135 ms. With one client for
all, the imports of the live doctor take 315 ms instead of 440 ms, and those of the exporter 29 MiB instead of 37 MiB.
prometheus-api-client imports requests for itself; it takes any session, so ours sends with this client.
"""
