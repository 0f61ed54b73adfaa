"""Streams between the processes of a job: frames, authentication, messages. JSON only, never pickle.

The asyncio streams are in `unirun.wire.aio`, which most commands do not import: asyncio takes longer than they do.
"""

from unirun.wire.blocking import BlockingStream
from unirun.wire.codec import decode, encode
from unirun.wire.credentials import Credentials, load_credentials
from unirun.wire.frames import MAX_FRAME, VERSION, FrameReader, encode_frame
from unirun.wire.handshake import Token, load_token, new_token
from unirun.wire.messages import Message

__all__ = [
    "MAX_FRAME",
    "VERSION",
    "BlockingStream",
    "Credentials",
    "FrameReader",
    "Message",
    "Token",
    "decode",
    "encode",
    "encode_frame",
    "load_credentials",
    "load_token",
    "new_token",
]
