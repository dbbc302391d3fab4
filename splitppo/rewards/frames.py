"""Messages between the trainer and its reward workers: pickles, each after its length in bytes.

Both ends are processes of this program on one machine, so unpickling is safe.
"""

import asyncio
import pickle
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("!Q")


def pack(message: Any) -> bytes:
    """The bytes of a message."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def receive(stream: BinaryIO) -> Any:
    """The next message of a blocking stream. EOFError: the other end has closed."""
    (length,) = _LENGTH.unpack(_read_exactly(stream, _LENGTH.size))
    return pickle.loads(_read_exactly(stream, length))


def _read_exactly(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


async def read(stream: asyncio.StreamReader) -> Any:
    """The next message. EOFError, or its subclass asyncio.IncompleteReadError: the other end has closed."""
    try:
        data = await stream.readexactly(*_LENGTH.unpack(await stream.readexactly(_LENGTH.size)))
    except ConnectionError as error:
        raise EOFError from error
    return pickle.loads(data)
