"""What is wrong with a command that starts vLLM, found before it is rolled out."""
