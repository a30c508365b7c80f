"""Records windows of a server on request: `app.mount("/profiler", profiler_app(session))`."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from threading import RLock
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from instrument.base import files, queue
from instrument.base.errors import ConfigError
from instrument.base.rank_info import rank_info
from instrument.record.session import Session
from instrument.record.triggers.file import File
from instrument.record.triggers.trigger import Request

Answer = tuple[int, dict[str, Any] | bytes]  # the status, and JSON or a page

_MOST_STEPS, _LEAST_S, _MOST_S, _MOST_MEMORY = 10_000, 0.001, 60, 1_000_000_000
_MOST_BYTES, _KNOWN_WINDOWS = 1_000, 100  # older ids are forgotten
_OF_PROXIES = (b"forwarded", b"via", b"x-real-ip", b"x-forwarded-")
_WHY = {"failed": {"error": "See the log; or the run ended, or `instrument trigger` came first."}}
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
    triggers = [name for name, each in config.triggers.items() if isinstance(each, File)]
    fits = (
        config.export == "process" and config.profile_all_threads
    )  # else windows end late, or not
    if config.enabled and not (triggers and fits and all(0 < (n or 0) <= m for n, m in limits)):
        raise ConfigError(
            "profiler_app needs the trigger file, export=process, profile_all_threads=true and "
            f"limits, max_window_s={_MOST_S} and max_window_memory={_MOST_MEMORY:,} at most: use "
            "on_demand."
        )
    if token is not None and not (str(token).isprintable() and token == str(token).strip() != ""):
        raise ConfigError("The token of profiler_app must be printable text without outer spaces.")
    windows = _Windows(session, triggers)

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
    """The windows that clients requested: by id, the last seen state or the capture's folder."""

    def __init__(self, session: Session, triggers: list[str]) -> None:
        self._session, self._triggers = session, triggers
        self._known: dict[str, str | Path] = {}  # the newest is the last
        self._lock = RLock()

    def request(self, body: bytes) -> Answer:
        loop, most_s = self._session.loop, self._session.config.max_window_s or 0
        if not loop.running or loop.run is None or loop.run.triggers is None:
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
            newest = next(reversed(self._known), "")
            if self._state(newest) in ("waiting", "recording"):
                return 409, {"error": "Another window is not recorded yet.", "id": newest}
            window = secrets.token_hex(8)
            request = Request(f"POST /windows, id {window}", steps, seconds)
            if loop.run.triggers.requests.setdefault(self._triggers[0], request) is not request:
                return 409, {"error": "The window of `instrument trigger` has not begun yet."}
            self._known[window] = "waiting"
            if len(self._known) > _KNOWN_WINDOWS:
                del self._known[next(iter(self._known))]
        return 202, {"id": window, "state": "waiting"}

    def show(self, window: str, page: bool) -> Answer:
        state, file = self._state(window), "report.html" if page else "diagnosis.json"
        if state is None:
            return 404, {"error": "No such window, or this process has forgotten it."}
        if isinstance(state, str):
            return 404 if page else 200, {"id": window, "state": state} | _WHY.get(state, {})
        content = b""  # without the sink `report`, or if it failed
        with suppress(OSError):
            content = files.read_bytes(state / file)
        if page:
            return (200, content) if content else (404, {"error": "The capture has no page."})
        found = msgspec.Raw(content or b"null")
        return 200, {"id": window, "state": "done", "capture": state.name, "diagnosis": found}

    def _state(self, window: str) -> str | Path | None:
        """The state of a window, or the folder of its capture when it is done; None if unknown."""
        with self._lock:
            state = self._known.get(window)
            if isinstance(state, str):
                # None: another thread begins, ends or saves a window
                state = self._session.loop.exclusively(self._in_loop, window, wait=False) or state
                state = self._saved(window) if state == "saved" else state
                self._known[window] = state
            return state

    def _in_loop(self, window: str) -> str:
        loop, run = self._session.loop, self._session.loop.run
        if loop.running and run is not None and run.triggers is not None:
            if any(window in (each.why or "") for each in list(run.triggers.requests.values())):
                return "waiting"
            if loop.train.window and window in (loop.train.window.trigger_reason or ""):
                return "recording" if loop.recording else "waiting"
        return "saved"

    def _saved(self, window: str) -> str | Path:
        run, places = self._session.loop.run, list[Path]()
        for each in [*run.finisher.pending, *run.finisher.to_finish] if run else ():
            places += each, queue.busy_path(each), each.with_name(queue.name_of(each))
        for place in [*places, *(each.folder for each in self._session.captures if each.folder)]:
            with suppress(OSError):
                if window.encode() in files.read_bytes(place / files.METADATA_FILE):
                    return "exporting" if place.name.startswith(".") else place
        return "failed"
