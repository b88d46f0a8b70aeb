"""Settings of a service: where it is reached, whom it trusts, and how much it takes."""

from __future__ import annotations

from ipaddress import ip_address

import msgspec

from perdure.errors import ConfigurationError

PORT = 7433
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of what one client can ask for."""

    body: int = 1 << 20
    """Bytes in a request's body."""
    messages: int = 100
    """Messages in a request."""
    page: int = 200
    """Entries on a page of a list."""
    streams: int = 1024
    """Open streams in this process."""
    streams_of_owner: int = 64
    """Open streams of one owner in this process."""
    wait: float = 300.0
    """Seconds that a request can wait for an answer."""
    head: float = 20.0
    """Seconds that a request's line and headers may take to come in."""
    patience: float = 30.0
    """Seconds until a reader that takes nothing is cut off, and that a body may take to come in."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The setup of a service."""

    host: str = "127.0.0.1"
    port: int = PORT
    names: tuple[str, ...] = ()
    """Further names under which browsers and clients reach it, as in `Host: perdure.example.org`."""
    origins: tuple[str, ...] = ()
    """Origins of other pages that may use the API from a browser, such as `https://app.example.org`."""
    owner_header: str | None = None
    """The header in which a proxy that has signed users in names the owner."""
    proxy: str | None = None
    """The address of that proxy: nobody else's header counts."""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if (self.owner_header is None) != (self.proxy is None):
            raise ConfigurationError(
                "A header that names the owner is trusted from one address only. Give both: "
                "--owner-header X-Forwarded-User --trust-proxy 10.0.0.5"
            )

    @property
    def is_local(self) -> bool:
        """Tell whether only this machine can reach it."""
        return is_loopback(self.host)

    @property
    def known_hosts(self) -> frozenset[str]:
        """The names that a request's Host may have, without a port."""
        return frozenset(name.lower() for name in (*_LOOPBACK, _in_url(self.host), *self.names))

    @property
    def url(self) -> str:
        """Return the address at which people open it on this machine."""
        return f"http://{'127.0.0.1' if _is_everywhere(self.host) else _in_url(self.host)}:{self.port}"


def is_loopback(host: str) -> bool:
    """Tell whether an address or a name means this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_everywhere(host: str) -> bool:
    """Tell whether an address means all of this machine's addresses. Browsers cannot open it."""
    try:
        return ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
