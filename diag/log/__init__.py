"""Read a vLLM server's log: raw line -> `parse_line` -> `patterns` -> `interpreter` -> `meanings` -> `states`.

`ending` judges how a log ends; `server_log` chooses between two interpretations where a line may be a client's.

`tail` follows a log file; `files` reads logs that are named, and `paste` undoes what a log store, a terminal or a page
has done to one. `memory_sizes` reads memory sizes.
"""
