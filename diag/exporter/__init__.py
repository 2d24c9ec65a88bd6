"""What stands beside a vLLM server on its host: GPUs, log and processes, as samples; and the page that joins them."""

import logging

logging.getLogger("diag.exporter").addHandler(logging.NullHandler())  # the doctor says the same in its report
