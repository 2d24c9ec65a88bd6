"""Rules that find errors in the command that launches vLLM, before it is rolled out."""
