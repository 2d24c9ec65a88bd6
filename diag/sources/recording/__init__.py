"""Recordings: folders of scraped pages, read and written."""
