"""Messages between a pool and its workers: pickles of plain data, each behind its length in bytes.

Both ends are processes of this program on one machine, so that what arrives may be unpickled.
"""

import asyncio
import pickle
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("!Q")


def pack(message: Any) -> bytes:
    """`message` as the bytes to send."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def receive(stream: BinaryIO) -> Any:
    """The next message of a blocking stream. EOFError: the other end is gone."""
    (length,) = _LENGTH.unpack(_read_exactly(stream, _LENGTH.size))
    return pickle.loads(_read_exactly(stream, length))


async def read(stream: asyncio.StreamReader) -> Any:
    """The next message. EOFError (asyncio.IncompleteReadError is one): the other end is gone."""
    try:
        data = await stream.readexactly(*_LENGTH.unpack(await stream.readexactly(_LENGTH.size)))
    except ConnectionError as error:
        raise EOFError from error
    return pickle.loads(data)


def _read_exactly(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data
