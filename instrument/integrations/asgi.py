"""Records windows of a server on request: `app.mount("/profiler", profiler_app(session))`."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ipaddress import ip_address
from threading import Lock
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from instrument.base import files
from instrument.base.errors import ConfigError
from instrument.base.rank_info import rank_info
from instrument.record.requests import RequestedWindow
from instrument.record.session import Session

Answer = tuple[int, dict[str, Any] | bytes]  # the status, and JSON or a page

_MOST_STEPS, _LEAST_S, _MOST_S, _MOST_MEMORY = 10_000, 0.001, 60, 1_000_000_000
_MOST_BYTES, _KNOWN_WINDOWS = 1_000, 100  # older ids are forgotten
_OF_PROXIES = (b"forwarded", b"via", b"x-real-ip", b"x-forwarded-")
_WHY = {"failed": {"error": "See the log; or the run ended first."}}
_HEADERS = [(b"cache-control", b"no-store"), (b"www-authenticate", b"Bearer")]


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    steps: Annotated[int, msgspec.Meta(ge=1, le=_MOST_STEPS)] | None = None
    seconds: Annotated[float, msgspec.Meta(ge=_LEAST_S)] | None = None


def profiler_app(session: Session, *, token: str | None = None) -> Callable[..., Awaitable[None]]:
    """Return an ASGI app (for asyncio) with which clients record windows of `session`.

    The app never blocks the event loop, but a call that begins or ends a window waits for torch.

    Args:
        session: the server's session, which the server starts, with the preset `on_demand`.
        token: what clients must send as `Authorization: Bearer TOKEN`. None: only clients that
            connect to a loopback address are answered, which is unsafe behind a local proxy.

    Raises:
        ConfigError: the session's config does not fit, or no client can send the token.
    """
    config = session.config
    limits = (config.max_window_s, _MOST_S), (config.max_window_memory, _MOST_MEMORY)
    # else windows end late, or not
    fits = config.export == "process" and config.profile_all_threads
    if config.enabled and not (fits and all(0 < (n or 0) <= m for n, m in limits)):
        raise ConfigError(
            "profiler_app needs export=process, profile_all_threads=true and limits, "
            f"max_window_s={_MOST_S} and max_window_memory={_MOST_MEMORY:,} at most: use on_demand."
        )
    if token is not None and not (str(token).isprintable() and token == str(token).strip() != ""):
        raise ConfigError("The token of profiler_app must be printable text without outer spaces.")
    windows = _Windows(session)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":  # otherwise the server answers 500 and logs it
            await send({"type": "websocket.close"})
        if scope["type"] != "http":
            return
        status, content = _refused(scope, token) or await _answer(windows, scope, receive)
        body = content if isinstance(content, bytes) else msgspec.json.encode(content)
        kind = b"application/json" if isinstance(content, dict) else b"text/html"
        headers = [(b"content-type", kind), *_HEADERS]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def _refused(scope: Any, token: str | None) -> Answer | None:
    headers = {name.lower(): value for name, value in scope["headers"]}
    if token is not None:
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer" and hmac.compare_digest(given, token.encode()):
            return None
        return 401, {"error": "Send the token of profiler_app as Authorization: Bearer TOKEN."}
    host = headers.get(b"host", b"")
    # a browser may send requests of another site, also to a name of its own for 127.0.0.1
    own_site = headers.get(b"origin", b"://" + host).partition(b"://")[2] == host
    direct = own_site and not any(name.startswith(_OF_PROXIES) for name in headers)
    with suppress(ValueError):
        names = [(scope.get(end) or [""])[0] for end in ("server", "client")]
        names.append(urlsplit(f"//{host.decode('latin-1')}").hostname or "")
        if direct and all(name == "localhost" or ip_address(name).is_loopback for name in names):
            return None
    return 403, {"error": "Without a token, profiler_app answers only clients on its machine."}


async def _answer(windows: _Windows, scope: Any, receive: Any) -> Answer:
    # with `mount`, the path begins with the app's place, except in old versions of Starlette
    path = scope["path"].removeprefix(scope.get("root_path", "")).strip("/")
    match scope["method"], *path.split("/"):
        case "POST", "windows":
            body, more = b"", True
            while more and len(body) <= _MOST_BYTES:
                message = await receive()
                body, more = body + message.get("body", b""), message.get("more_body", False)
            return await asyncio.to_thread(windows.request, body)
        case "GET", "windows", window, *page if page in ([], ["report"]):
            return await asyncio.to_thread(windows.show, window, bool(page))
    return 404, {"error": "profiler_app has POST /windows, GET /windows/ID and its /report only."}


class _Windows:
    """The windows that clients requested, by id; the newest is the last."""

    def __init__(self, session: Session) -> None:
        self._session, self._lock = session, Lock()
        self._requested: dict[str, RequestedWindow] = {}

    def request(self, body: bytes) -> Answer:
        most_s = self._session.config.max_window_s or 0
        if not self._session.running:
            return 503, {"error": "The session was not started, or its config disables it."}
        if rank_info().world_size > 1:
            return 503, {"error": "Several ranks record together: use `instrument trigger`."}
        wanted = _Wanted()
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            wanted = msgspec.json.decode(body if len(body) <= _MOST_BYTES else b"", type=_Wanted)
        steps, seconds = wanted.steps, wanted.seconds
        if (steps is None) == (seconds is None) or (seconds or 0) > most_s:
            sizes = f"1 to {_MOST_STEPS} steps, or {_LEAST_S:g} to {most_s:g} seconds"
            return 400, {"error": f'Send {{"steps": 20}} or {{"seconds": 5}}: {sizes}.'}
        with self._lock:
            newest = next(reversed(self._requested.values()), None)
            if newest is not None and newest.state in ("waiting", "recording"):
                return 409, {"error": "Another window is not recorded yet.", "id": newest.id}
            window = self._session.request(steps, seconds=seconds, why="POST /windows")
            if window.state == "failed":
                return 409, {"error": "A window that the program requested has not begun yet."}
            self._requested[window.id] = window
            if len(self._requested) > _KNOWN_WINDOWS:
                del self._requested[next(iter(self._requested))]
        return 202, {"id": window.id, "state": "waiting"}

    def show(self, id: str, page: bool) -> Answer:
        window = self._requested.get(id)
        if window is None:
            return 404, {"error": "No such window, or this process has forgotten it."}
        state, folder = window.state, window.folder
        if folder is None:
            return 404 if page else 200, {"id": id, "state": state} | _WHY.get(state, {})
        content = b""  # without the sink `report`, or if it failed
        with suppress(OSError):
            content = files.read_bytes(folder / ("report.html" if page else "diagnosis.json"))
        if page:
            return (200, content) if content else (404, {"error": "The capture has no page."})
        found = msgspec.Raw(content or b"null")
        return 200, {"id": id, "state": state, "capture": folder.name, "diagnosis": found}
