"""Proxies, as the environment names them: http_proxy, https_proxy, all_proxy, no_proxy."""

import ipaddress
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from diag.http.address import Address
from diag.http.credentials import basic
from diag.http.failure import of_proxy


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy; the headers are a secret."""

    host: str
    port: int
    headers: dict[str, str] = field(default_factory=dict, repr=False)


def proxy_for(address: Address) -> Proxy | None:
    """The proxy to use; Failure where the environment names one that cannot be used."""
    proxies = getproxies()
    text = proxies.get(address.scheme) or proxies.get("all")
    if not text or address.is_loopback or _is_exempt(address, proxies.get("no", "")):
        return None
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        host, port = url.hostname, url.port or 80
    except ValueError as error:
        raise of_proxy() from error
    if url.scheme != "http" or not host:  # socks and proxies behind TLS are not spoken
        raise of_proxy()
    user = f"{unquote(url.username)}:{unquote(url.password or '')}" if url.username else ""
    return Proxy(host, port, {"Proxy-Authorization": basic(user)} if user else {})


def _is_exempt(address: Address, exempt: str) -> bool:
    """Whether no_proxy names the host, its domain, or a network that it is in."""
    if proxy_bypass(address.host) or proxy_bypass(address.instance):
        return True
    with suppress(ValueError):
        host = ipaddress.ip_address(address.host)
        return any(host in network for network in map(_network, exempt.split(",")) if network)
    return False


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    with suppress(ValueError):
        return ipaddress.ip_network(text.strip(), strict=False)
    return None
