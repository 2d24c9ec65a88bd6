"""The one way to ask a server: addresses, credentials, limits of time and size, and failures in words."""
