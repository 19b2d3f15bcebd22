"""HTTP to the model server and the hook in the same pod; the standard library suffices."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_ANSWER_BYTES = 1 << 30


class UnreachableError(Exception):
    """Nothing answers at the address, or the connection broke."""


@dataclass(frozen=True)
class Answer:
    """Status and body of a response."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The decoded body; None when it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


def _context(url: str) -> ssl.SSLContext | None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https":
        return None
    context = ssl.create_default_context()
    if parts.hostname in LOOPBACK:
        # The server of the same pod: its certificate is made out to the lane's Service.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def request(
    url: str, body: dict[str, Any] | None = None, key: str | None = None, timeout: float = 30.0
) -> Answer:
    """GET, or POST of a JSON body; proxies of the environment are not used.

    Any HTTP status is an Answer. Raises UnreachableError.
    """
    headers = {"Accept": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None
    if body is not None:
        data = json.dumps(body).encode("ascii")
        headers["Content-Type"] = "application/json"
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if (context := _context(url)) is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)
    # The address comes from the RunSpec, whose scheme the operator writes.
    prepared = urllib.request.Request(url, data=data, headers=headers)  # noqa: S310
    try:
        with opener.open(prepared, timeout=timeout) as response:
            return Answer(response.status, response.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read(1 << 20))
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(type(error).__name__) from None
