"""Fetches the media that a request names by URL, by https and only from hosts that the gateway's settings name. An address inside the
gateway's own network must be in the settings as an address: a host name that leads there is refused."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property, partial

import httpx2

from omnistage.gateway.accounts import HeldMemory, HttpAccount, Ledger
from omnistage.gateway.failure import ApiError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

Fetch = Callable[[str, str], Awaitable[bytes]]
"""Fetches the bytes at a URL, the first argument; the second is the field in which it stands. Raises ApiError."""

LIMIT_S = 10.0
"""Seconds for all media of one request, counted from the first on."""

REQUESTS = 4
"""All requests together may hold this many times the bytes that one request may fetch, and those of one host its share of that. Bytes
count until their request has been answered."""

MAX_REDIRECTS = 3
HTTPS_PORT = 443


class Fetcher:
    """Fetches media for all requests. hosts: the allowed hosts, NAME, ADDRESS, or either with :PORT; without a port, that of https.
    most_bytes: the largest size of all media of one request together."""

    def __init__(self, hosts: Sequence[str], most_bytes: int) -> None:
        self._hosts = frozenset(_with_port(host.lower()) for host in hosts)
        self._most_bytes = most_bytes
        self._ledger = Ledger(REQUESTS * most_bytes)

    def of(self, account: HttpAccount) -> Fetch:
        """The function that fetches for one request; until the request has ended its bytes count in the limit of all requests."""
        memory = HeldMemory([self._ledger], account.host, "too many media are being fetched")
        account.at_end.append(memory.free)
        return partial(self._fetch, _MediaBudget(self._most_bytes, memory))

    @cached_property
    def _trust(self) -> ssl.SSLContext:
        """The certificates that are trusted, read when the first medium is fetched."""
        return httpx2.create_ssl_context()

    async def _fetch(self, budget: _MediaBudget, url: str, field: str) -> bytes:
        """The bytes at a URL; it may redirect, but only on the same host. budget: counts bytes. field: field with the URL. Raises
        ApiError."""
        target = _parse_url(url, field)
        self._check(target, field)
        try:
            async with asyncio.timeout_at(budget.deadline()):
                for _ in range(MAX_REDIRECTS + 1):
                    answer = await self._get(budget, target, field)
                    if isinstance(answer, bytes):
                        return answer
                    if _authority(answer) != _authority(target) or answer.scheme != "https":
                        raise _refusal(field, f"{target.host} sends on to another host, {answer.host[:128]}: name what you mean")
                    target = answer
        except TimeoutError:
            raise _refusal(
                field, f"{target.host} did not give it in time: what a request names has to be here within {LIMIT_S:g} s"
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise _refusal(field, f"cannot be fetched from {target.host}: {str(error) or type(error).__name__}") from error
        raise _refusal(field, f"{target.host} sends on more than {MAX_REDIRECTS} times")

    def _check(self, target: httpx2.URL, field: str) -> None:
        """Raises ApiError unless the URL is of https, without a name and password, and of an allowed host. field: the field with the
        URL."""
        if target.scheme != "https" or target.userinfo:
            raise _refusal(field, "must be a data: URL, or one of https without a name and password")
        if _authority(target) not in self._hosts:
            hint = "Send it as a data: URL. Who runs the gateway names hosts in OMNISTAGE_MEDIA_HOSTS, or with its --media-hosts."
            refusal = "nothing is fetched from the web" if not self._hosts else f"nothing is fetched from {_authority(target)[:128]}"
            raise ApiError(400, f"{field}: {refusal}", param=field, code="invalid_value", reason="BAD_REQUEST", hint=hint)

    async def _get(self, budget: _MediaBudget, target: httpx2.URL, field: str) -> bytes | httpx2.URL:
        """The bytes at this URL, or the URL that it redirects to. Raises ApiError."""
        address = await _address_of(target, field)
        # Connect to the address that was checked, because a second look-up of the name may give another one.
        headers = {"Host": target.netloc.decode(), "Accept-Encoding": "identity", "User-Agent": "omnistage"}
        extensions = {"sni_hostname": target.host}
        async with (
            httpx2.AsyncClient(verify=self._trust, trust_env=False, timeout=LIMIT_S) as client,
            client.stream("GET", target.copy_with(host=address), headers=headers, extensions=extensions) as answer,
        ):
            if answer.has_redirect_location:
                return target.join(answer.headers["location"])
            if answer.status_code != httpx2.codes.OK:
                raise _refusal(field, f"{target.host} says {answer.status_code}")
            pieces: list[bytes] = []
            async for piece in answer.aiter_raw(65_536):
                budget.grow(len(piece), field)
                pieces.append(piece)
            return b"".join(pieces)


class _MediaBudget:
    """Counts the bytes of media that one request has fetched. max_bytes: the largest allowed number. memory: counts them among all
    requests."""

    def __init__(self, max_bytes: int, memory: HeldMemory) -> None:
        self._max_bytes, self._memory = max_bytes, memory
        self._deadline: float | None = None

    def deadline(self) -> float:
        """When the time for the media of this request is over, by the clock of the event loop; the time begins with the first call."""
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + LIMIT_S
        return self._deadline

    def grow(self, size: int, field: str) -> None:
        """Count more bytes. Raises ApiError if they are too many."""
        if self._memory.held_bytes + size > self._max_bytes:
            raise _refusal(field, f"with it the media of this request have more than {self._max_bytes >> 20} MiB")
        self._memory.take(size)


async def _address_of(target: httpx2.URL, field: str) -> str:
    """The IP address of the host. Raises ApiError for a host name that leads into a network that is not public."""
    literal = _literal(target.host)
    if literal is not None:
        return str(literal)
    address_infos = await asyncio.get_running_loop().getaddrinfo(target.host, target.port or HTTPS_PORT)
    # The text after % names the interface of an address that is local to a link.
    addresses = [ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in address_infos]
    if not addresses or not all(_is_public(address) for address in addresses):
        raise _refusal(field, f"{target.host} is in a private network; its very address would have to be named by who runs the gateway")
    return str(addresses[0])


def _is_public(address: Address) -> bool:
    """Whether an address is public; an IPv4 address inside an IPv6 address is judged as IPv4."""
    ipv4_address = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (ipv4_address or address).is_global


def _literal(host: str) -> Address | None:
    """The IP address that `host` is; None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _parse_url(url: str, field: str) -> httpx2.URL:
    try:
        return httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise _refusal(field, f"is no URL: {error}") from None


def _authority(target: httpx2.URL) -> str:
    """HOST:PORT of a URL, in lower case."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    return f"{host.lower()}:{target.port or HTTPS_PORT}"


def _with_port(host: str) -> str:
    """HOST:PORT, with the port of https if `host` has no port."""
    # Without brackets, several colons are those of an IPv6 address.
    has_port = host.rpartition(":")[2].isdecimal() and (host.count(":") == 1 or "]:" in host)
    if has_port:
        return host
    address = _literal(host)
    return f"[{host}]:{HTTPS_PORT}" if address is not None and address.version == 6 else f"{host}:{HTTPS_PORT}"


def _refusal(field: str, reason: str) -> ApiError:
    return ApiError(400, f"{field}: {reason}", param=field, code="invalid_value", reason="BAD_REQUEST")
