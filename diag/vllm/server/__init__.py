"""What a running server says of its configuration, each value with its source."""
