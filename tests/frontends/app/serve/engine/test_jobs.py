"""Channels: the pieces of answers that wait for a reader."""

from __future__ import annotations

import asyncio

from weft.frontends.app.serve.engine.jobs import Channel


def test_unread_pieces_are_joined() -> None:
    """However long a reader stays away, a channel holds one piece for each answer."""
    from weft.frontends.app.serve.engine.jobs import AnswerPiece

    async def run() -> None:
        channel = Channel()
        for count in range(1, 1001):
            channel.put(AnswerPiece(count % 2, "x", tokens=count))
        channel.put(AnswerPiece(0, "end", tokens=1001, finish="stop"))
        one, other = sorted(await channel.receive(), key=lambda piece: piece.index)
        assert one.text == "x" * 500 + "end" and one.finish == "stop" and one.tokens == 1001
        assert other.text == "x" * 500 and other.finish is None

    asyncio.run(run())
