"""The configuration of a running server, each value with its source."""
