"""Streams between the processes of a job: frames, authentication, messages. JSON only, never pickle."""

from unirun.wire.aio import BACKLOG, Stream, accept, connect, listen
from unirun.wire.blocking import BlockingStream
from unirun.wire.codec import decode, encode
from unirun.wire.frames import MAX_FRAME, VERSION, FrameReader, encode_frame
from unirun.wire.handshake import Token, load_token, new_token
from unirun.wire.messages import Message

__all__ = [
    "BACKLOG",
    "MAX_FRAME",
    "VERSION",
    "BlockingStream",
    "FrameReader",
    "Message",
    "Stream",
    "Token",
    "accept",
    "connect",
    "decode",
    "encode",
    "encode_frame",
    "listen",
    "load_token",
    "new_token",
]
