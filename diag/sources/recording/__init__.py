"""Recordings, which are folders of scraped pages: read, replayed and written."""
