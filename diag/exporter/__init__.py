"""Samples of a vLLM server's host: GPUs, log and processes; and the page that joins them with vLLM's own."""

import logging

logging.getLogger("diag.exporter").addHandler(logging.NullHandler())  # the doctor has these messages in its report
