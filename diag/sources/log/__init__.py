"""Logs without a server: files, folders of them, or standard input."""
