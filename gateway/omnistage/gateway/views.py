"""Views of the router's client for the senders of requests."""

from __future__ import annotations

from omnistage.client import AsyncOmni
from omnistage.client.key import ApiKey
from omnistage.host.token import GATEWAY_HOST, GATEWAY_KEY, Token


class Views:
    """Makes views of the router's client. token: proves to the router that this is the gateway of its stack; then the router shares its
    places among the hosts that the gateway names. None: all senders together share the places of the gateway's own host."""

    def __init__(self, omni: AsyncOmni, token: Token | None) -> None:
        self._omni, self._token = omni, token

    def of(self, key: str, host: str) -> AsyncOmni:
        """A view that asks for one sender. key: the sender's, or a text in place of it. host: a name of the host that it asks from. Raises
        BadRequestError for a text that cannot be a key."""
        proof = ((GATEWAY_KEY, self._token.secret), (GATEWAY_HOST, host)) if self._token else ()
        return self._omni.as_client(ApiKey(key, extra_metadata=proof))
