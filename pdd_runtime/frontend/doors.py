"""Who may come in where."""

from __future__ import annotations

import logging
from typing import Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from pdd_runtime.errors import PddError
from pdd_runtime.frontend.errors import ForbiddenError, InvalidKeyError, answer_for
from pdd_runtime.frontend.keys import OPERATOR, Key, Keys, digest, operator_key
from pdd_runtime.frontend.limits import Ledger
from pdd_runtime.frontend.sending import send_error
from pdd_runtime.frontend.visit import Visit
from pdd_runtime.graph import Frontend
from pdd_runtime.rpc import SparseLog

log = logging.getLogger(__name__)

OPEN = frozenset({"/health", "/ready", "/docs", "/docs/oauth2-redirect", "/openapi.json"})
"""What load balancers and people without a key may see: nothing in it is anybody's."""
OF_THE_API = ("/v1/", "/pdd/tokenizer/")
"""Where paths for users begin; all others are for operators."""


class Access:
    """The keys of a graph, and what has been used of them."""

    def __init__(self, keys: Keys, operator: Key | None = None, *, share: bool = False) -> None:
        """`operator`: the one key for all doors. `share`: see `Visit`."""
        self._keys, self._operator, self._share = keys, operator, share
        self.ledger = Ledger()

    @staticmethod
    def of(frontend: Frontend, secret: str) -> Access | None:
        """As a graph has it; None: without keys. `secret`: the graph's, from which its own tools have their key.
        Raises `GraphError`."""
        if frontend.keys is None:
            return None
        operator = Key(name=OPERATOR, sha256=digest(operator_key(secret).encode()), admin=True) if secret else None
        return Access(Keys(frontend.keys, operator), operator, share=frontend.share)

    async def watch(self) -> None:
        """Take up what changes in the keys' file. Endless."""
        await self._keys.watch()

    def visit(self, scope: Scope) -> Visit:
        """Raises `InvalidKeyError` and `ForbiddenError`."""
        path: str = scope["path"]
        if path in OPEN:
            return Visit()
        key = self._key(scope)
        door: Literal["API", "operators"] = "API" if path.startswith(OF_THE_API) else "operators"
        if key is not self._operator and key.admin != (door == "operators"):
            raise ForbiddenError(
                f"key {key.name} is not for this",
                why=f"it is for {'operators' if key.admin else 'the API'}, and {path} is for {door}",
                fix="`pdd-runtime keys add --admin` makes one for operators" if door == "operators" else "",
            )
        return Visit(key, self.ledger.account(key.name), share=self._share)

    def _key(self, scope: Scope) -> Key:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, presented = (sent[0] if len(sent) == 1 else b"").partition(b" ")
        if scheme.lower() != b"bearer":
            raise InvalidKeyError("no API key was sent", fix="send the header `Authorization: Bearer KEY`")
        key = self._keys.find(presented.strip())
        if key is None:
            raise InvalidKeyError("this API key is not known", fix="ask whoever runs this graph for one")
        return key


class Doors:
    """The layer in which every request gets its visit, or is refused."""

    def __init__(self, app: ASGIApp, access: Access | None) -> None:
        """No `access`: whoever reaches it may come in."""
        self._app, self._access = app, access
        self._refusals = SparseLog(log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope["pdd_visit"] = self._access.visit(scope) if self._access else Visit()
            except PddError as error:
                client, *_ = scope.get("client") or ("somebody",)
                self._refusals.warning("%s %.80r refused to %s: %s", scope["method"], scope["path"], client, error.what)
                await send_error(send, answer_for(error))
                return
        await self._app(scope, receive, send)
