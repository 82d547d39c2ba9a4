"""The encoder process: `python -m engine.encoder.process`, started by a gateway.

Its standard input is a socket (`engine.encoder.protocol`). The first message names the prepared
folder; then batches come in and vectors leave, in order. One thread, and those that compute. It
exits when the gateway closes its end, and stores nothing; its log line has no text.
`gateway.embeddings.encoder_client` is the other end.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.encoder.card import load_encoder_card
from engine.encoder.protocol import (
    EncodeBatch,
    EncodedBatch,
    EncoderReady,
    EncoderRejected,
    FromEncoder,
    StartEncoder,
    ToEncoder,
    encode_message,
    read_to_encoder,
    unpack_ids,
)
from engine.errors import ModelError
from engine.processes import end_with_parent
from engine.protocol import Decoder

if TYPE_CHECKING:
    from engine.encoder.text_parts import EncoderThreads

READ_BYTES = 2**16
"""Bytes per read."""


def load(start: StartEncoder) -> EncoderThreads:
    """Import torch, load the model and encode a text for each thread, so that the first request
    finds warm kernels.

    Raises ModelError.
    """
    import torch

    from engine.encoder.bert import BertEncoder, load_tensors
    from engine.encoder.text_parts import EncoderThreads

    card = load_encoder_card(Path(start.folder))
    threads = start.threads or torch.get_num_threads()
    encoder = EncoderThreads(BertEncoder(card, load_tensors(card)), threads)
    encoder.encode([[card.first_token_id, card.last_token_id]] * threads)
    return encoder


def encode_batch(encoder: EncoderThreads, batch: EncodeBatch) -> EncodedBatch:
    """Return the vectors of a batch. Raises IndexError for an id outside the vocabulary."""
    vectors = encoder.encode([unpack_ids(text).tolist() for text in batch.texts])
    sound = vectors.isfinite().all(dim=1).tolist()
    packed = vectors.numpy().astype("<f4", copy=False)
    found = [row.tobytes() if one else b"" for row, one in zip(packed, sound, strict=True)]
    return EncodedBatch(batch.number, found)


def serve(wire: socket.socket) -> int:
    """Serve until the gateway closes its end. Returns the exit status."""
    encoder: EncoderThreads | None = None
    try:
        for message in _receive(wire):
            if isinstance(message, StartEncoder):
                gc.disable()  # collections took a tenth of importing torch, and its objects stay
                try:
                    encoder = load(message)
                except ModelError as error:
                    _send(wire, EncoderRejected(error.code, error.message))
                    return 1
                finally:
                    gc.freeze()
                    gc.enable()
                _send(wire, EncoderReady(encoder.encoder.card.dimensions))
                continue
            assert encoder is not None, "the first message is StartEncoder"
            _send(wire, encode_batch(encoder, message))
    finally:
        if encoder is not None:
            encoder.close()
    return 0


def _receive(wire: socket.socket) -> Iterator[ToEncoder]:
    decoder = Decoder(read_to_encoder)
    while True:
        try:
            data = wire.recv(READ_BYTES)
        except ConnectionError:
            return
        if not data:
            return
        yield from decoder.feed(data)


def _send(wire: socket.socket, message: FromEncoder) -> None:
    with suppress(OSError):  # the gateway has gone; the next read says so
        wire.sendall(encode_message(message))


def main() -> int:
    """Serve the gateway that started this process. An error is one line, without its message."""
    end_with_parent(sys.stdin.fileno())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        with socket.socket(fileno=sys.stdin.fileno()) as wire:
            return serve(wire)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-6:]
        facts = {
            "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "event": "encoder_failed",
            "error": type(error).__name__,
            "frames": [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames],
        }
        with suppress(OSError):
            os.write(2, msgspec.json.encode(facts) + b"\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
