"""An OpenAI-compatible endpoint in front of `generate`, for libraries that run a rollout themselves.

An environment opens a session per rollout and hands its address and header to the library; each chat request of that
session is one more turn of one `Conversation`, so what was sampled is never encoded again. A request that does not
continue the conversation (a library that rewrites history) starts a new one; the last one becomes the episode. Needs
aiohttp. It answers text: images, tools and several choices are refused with a 400 that says so.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from secrets import token_hex
from typing import Any

from asyncrl.env import Conversation, Generate
from asyncrl.types import Message

HEADER = "X-Asyncrl-Rollout"


class Session:
    """One rollout: its conversation so far, and what went wrong in it."""

    def __init__(self, generate: Generate) -> None:
        self.generate = generate
        self.talk: Conversation | None = None
        self.history: list[Message] = []
        self.num_restarts = -1
        """Requests that did not continue the conversation, after the first."""
        self.error: Exception | None = None
        self._turn = asyncio.Lock()

    async def reply(self, messages: list[Message], max_tokens: int | None) -> tuple[str, str, int, int]:
        """The next reply: text, finish reason, tokens of the prompt, tokens of the reply."""
        async with self._turn:
            known = len(self.history)
            if self.talk is not None and len(messages) > known and messages[:known] == self.history:
                self.talk.extend(messages[known:])
            else:
                self.talk = Conversation(self.generate, messages)
                self.num_restarts += 1
            completion = await self.talk.generate(max_tokens=max_tokens)
            self.history = [*messages, {"role": "assistant", "content": completion.text}]
            return completion.text, completion.finish_reason, len(completion.prompt_ids), len(completion.token_ids)


class Endpoint:
    """Serves `/v1/chat/completions` on a loopback port."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._runner: Any = None
        self.url = ""

    async def start(self) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        await self._runner.cleanup()

    @contextmanager
    def session(self, generate: Generate) -> Iterator[tuple[Session, dict[str, str]]]:
        """A session for one rollout, and the header that its requests must carry."""
        key, session = token_hex(16), Session(generate)
        self._sessions[key] = session
        try:
            yield session, {HEADER: key}
        finally:
            del self._sessions[key]

    async def _answer(self, request: Any) -> Any:
        from aiohttp import web

        session = self._sessions.get(request.headers.get(HEADER, ""))
        if session is None:
            return web.json_response(_error("no such rollout"), status=404)
        body = await request.json()
        try:
            messages = as_messages(body)
            answer = await session.reply(messages, body.get("max_completion_tokens") or body.get("max_tokens"))
        except Exception as error:  # noqa: BLE001 - the boundary to another library: it gets a status, the rollout the error
            session.error = session.error or error
            return web.json_response(_error(str(error)), status=400)
        if body.get("stream"):
            return await _stream(request, body, answer)
        return web.json_response(_completion(body, answer))


def as_messages(body: dict[str, Any]) -> list[Message]:
    """The messages of a request, text only. Raises ValueError for what a text policy cannot be asked."""
    for key, refused in (("tools", bool(body.get("tools"))), ("n", (body.get("n") or 1) != 1)):
        if refused:
            raise ValueError(f"the request sets {key!r}, which this endpoint does not serve: it answers one text")
    return [{"role": str(m["role"]), "content": _text(m.get("content"))} for m in body["messages"]]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise ValueError("the request holds content that is not text")
    return "".join(part["text"] for part in content)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


def _usage(answer: tuple[str, str, int, int]) -> dict[str, int]:
    _, _, prompt, reply = answer
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


def _completion(body: dict[str, Any], answer: tuple[str, str, int, int]) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer[0]}
    choice = {"index": 0, "message": message, "finish_reason": answer[1]}
    return {**_head(body, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def _head(body: dict[str, Any], kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{token_hex(8)}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model", ""),
    }


async def _stream(request: Any, body: dict[str, Any], answer: tuple[str, str, int, int]) -> Any:
    """The whole reply as server-sent events: the text, the end, the usage."""
    from aiohttp import web

    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    head = _head(body, "chat.completion.chunk")
    delta = {"role": "assistant", "content": answer[0]}
    events = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}]
    events += [{**head, "choices": [{"index": 0, "delta": {}, "finish_reason": answer[1]}]}]
    events += [{**head, "choices": [], "usage": _usage(answer)}]
    for event in events:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
