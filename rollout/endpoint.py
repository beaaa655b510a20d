"""An HTTP server on this machine, in a thread and event loop of its own, that answers programs as OpenAI's API does.

    POST /SESSION/v1/chat/completions      rollout.agents.request says what may be asked
    GET  /SESSION/v1/models

The name of a session is the secret that lets a program into its episode, and no other. An answer is sampled as a whole;
as a stream it comes in pieces once it is there, with comments before that keep the connection alive.
"""

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web

from rollout.agents.answer import DONE, WAITING, as_events, as_object, event
from rollout.agents.request import MODEL, Asked, Refused
from rollout.agents.session import CLOSED, Call, Session

HOST = "127.0.0.1"
MAX_BODY_BYTES = 32 << 20
KEEPALIVE_S = 10.0
BACKLOG = 1024  # connections that may wait to be accepted: all episodes may begin at once
ANSWER_S = 15.0  # for its thread to start, to open or close a session, and to end
RETRY_AFTER_S = 1


class Endpoint:
    """Serves the sessions that are open. Any event loop may open and close them; closed with `close`."""

    def __init__(self, *, keepalive_s: float = KEEPALIVE_S, max_body_bytes: int = MAX_BODY_BYTES):
        self.keepalive_s, self.max_body_bytes = keepalive_s, max_body_bytes
        self._sessions: dict[str, Session] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agent-endpoint", daemon=True)
        self._thread.start()
        try:
            self._runner, self.port = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(ANSWER_S)
        except BaseException:
            self._end_loop()
            raise

    async def open(self, session: Session) -> str:
        """The base URL at which a program reaches this session. Raises RuntimeError after `close`."""
        return await self._within(self._open(session))

    async def close_session(self, session: Session) -> None:
        """Ends what is being sampled for it; its requests are refused from then on. May be called again."""
        await self._within(self._close_session(session))

    def close(self) -> None:
        """Ends every session, then the server and its thread. May be called again."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._close_all(), self._loop).result(ANSWER_S)
            self._end_loop()

    async def _within(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of work on the endpoint's loop."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the endpoint of the agents was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_S)
        except TimeoutError as error:
            raise RuntimeError(f"the endpoint of the agents does not answer ({ANSWER_S:g} s)") from error

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_S)
        if not self._thread.is_alive():
            self._loop.close()

    # -- on its loop --

    async def _serve(self) -> tuple[web.AppRunner, int]:
        app = web.Application(client_max_size=self.max_body_bytes, middlewares=[answer_errors])
        app.router.add_post("/{session}/v1/chat/completions", self._complete)
        app.router.add_get("/{session}/v1/models", self._list_models)
        # The handler of a client that hangs up is cancelled.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0, backlog=BACKLOG).start()
        return runner, runner.addresses[0][1]

    async def _open(self, session: Session) -> str:
        name = secrets.token_hex(16)
        self._sessions[name] = session
        return f"http://{HOST}:{self.port}/{name}/v1"

    async def _close_session(self, session: Session) -> None:
        for name in [name for name, other in self._sessions.items() if other is session]:
            del self._sessions[name]
        await session.close()

    async def _close_all(self) -> None:
        for session in list(self._sessions.values()):
            await self._close_session(session)
        await self._runner.cleanup()

    def _session(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise Refused(404, CLOSED, code="session_closed")
        return session

    async def _list_models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "tandem"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        session = self._session(request)
        try:
            asked, call = session.begin(body, request.headers.get("Idempotency-Key", ""))
            if asked.stream:
                return await self._stream(request, session, asked, call)
            return web.json_response(as_object(await session.wait(call), asked))
        except (Refused, ConnectionError):
            raise
        except Exception:
            session.note_bug()
            raise

    async def _stream(self, request: web.Request, session: Session, asked: Asked, call: Call) -> web.StreamResponse:
        """Begins with the first thing there is to say, so that an early failure still has a status of its own."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        answered = asyncio.ensure_future(session.wait(call))
        try:
            while not (await asyncio.wait({answered}, timeout=self.keepalive_s))[0]:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(WAITING)
            answer = answered.result()
        except Refused as refused:
            if not response.prepared:
                raise
            await response.write(event(refused.body) + DONE)
            return response
        finally:
            answered.cancel()
        if not response.prepared:
            await response.prepare(request)
        for piece in as_events(answer, asked):
            await response.write(piece)
        await response.write_eof()
        return response


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error in OpenAI's form. Clients ask again by themselves only where that may help."""
    try:
        return await handler(request)
    except Refused as error:
        refused = error
    except web.HTTPRequestEntityTooLarge:
        refused = Refused(413, "the request is larger than this endpoint takes", code="request_too_large")
    except web.HTTPException as error:
        known = "POST .../v1/chat/completions and GET .../v1/models"
        refused = Refused(error.status, f"{request.method} {request.path}: {error.reason}; there are {known}")
    except ConnectionError:
        raise
    except Exception as error:
        refused = Refused(500, f"an error of the endpoint's own: {type(error).__name__}: {error}")
    headers = {"x-should-retry": "true" if refused.retry else "false"}
    if refused.retry:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return web.json_response(refused.body, status=refused.status, headers=headers)
