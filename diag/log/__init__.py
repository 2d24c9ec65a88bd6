"""Read a vLLM server's log: raw line -> `parse_line` -> `recognise` (the table in `patterns`) -> `server_log`.

`server_log` feeds the `trackers` and returns samples. `tail` follows a log file; `memory_sizes` reads memory sizes.
`files` reads logs that are named; `export` and `paste` undo what a log store, a terminal or a page has done to one.
"""
