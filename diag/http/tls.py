"""TLS contexts from credentials; apart from addresses, since a run without a server needs no `ssl`."""

import ssl
from functools import lru_cache
from typing import Any

from diag.core.errors import BadUsage
from diag.http.address import Credentials


class _NamedContext(ssl.SSLContext):
    """Requests and verifies `server_name` instead of the host's name."""

    server_name = ""

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        return super().wrap_socket(*args, **(options | {"server_hostname": self.server_name}))


@lru_cache(maxsize=8)  # loading the system's authorities takes longer than a scrape
def tls(credentials: Credentials) -> ssl.SSLContext:
    """Return the context that verifies servers by the system's authorities, or by DIAG_CA_FILE alone."""
    ca_file, client_cert, client_key = credentials.ca_file, credentials.client_cert, credentials.client_key
    if client_key and not client_cert:
        raise BadUsage("DIAG_CLIENT_KEY is set without DIAG_CLIENT_CERT")
    try:
        if not credentials.server_name:
            context = ssl.create_default_context(cafile=ca_file or None)
        else:
            context = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
            context.server_name = credentials.server_name
            if ca_file:
                context.load_verify_locations(ca_file)
            else:
                context.load_default_certs()
    except OSError as error:
        raise BadUsage(f"DIAG_CA_FILE {ca_file} cannot be used: {_why(error)}") from error
    if credentials.unverified:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if client_cert:
        try:
            # An empty password prevents a prompt, which an unattended run cannot answer.
            context.load_cert_chain(client_cert, client_key or None, password="")
        except OSError as error:
            raise BadUsage(f"DIAG_CLIENT_CERT {client_cert} cannot be used: {_why(error)}") from error
    return context


def _why(error: OSError) -> str:
    return "not in PEM format, or encrypted" if isinstance(error, ssl.SSLError) else error.strerror or str(error)
