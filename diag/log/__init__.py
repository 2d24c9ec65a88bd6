"""Read a vLLM server's log: raw line -> `parse_line` -> `patterns` -> `interpreter` -> `states` -> `server_log`.

`tail` follows a log file; `files` reads logs that are named, and `paste` undoes what a log store, a terminal or a page
has done to one. `memory_sizes` reads memory sizes.
"""
