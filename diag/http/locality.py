"""Whether a server runs on this host."""

import socket

from diag.http.address import Address


def is_here(address: Address) -> bool:
    """Whether the address is one of this host's."""
    if address.is_loopback:
        return True
    try:
        places = socket.getaddrinfo(address.host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # unknown or invalid name
        return False
    return any(_binds(family, place[0]) for family, _, _, _, place in places)


def _binds(family: int, name: str | int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((name, 0))
    except OSError:
        return False
    return True
