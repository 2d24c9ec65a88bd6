"""A /metrics page in the text format 0.0.4, read into samples."""
