"""An encoder's process without torch: a text's vector is its own bytes.

A text that begins with `DIES` ends the process, one that begins with `HANGS` stops it, and one that
begins with `DAMAGED` has no finite vector. The folder of the first message may be a code to reject
with, or empty for a process that ends at once.
"""

from __future__ import annotations

import signal
import socket
import sys

from engine.encoder.protocol import (
    EncodedBatch,
    EncoderReady,
    EncoderRejected,
    StartEncoder,
    read_to_encoder,
    unpack_ids,
)
from engine.wire import Decoder, encode_frame

DIES, HANGS, DAMAGED = 666, 667, 668


def main() -> int:
    """Serve until the gateway leaves."""
    decoder = Decoder(read_to_encoder)
    with socket.socket(fileno=sys.stdin.fileno()) as wire:
        while data := wire.recv(2**16):
            for message in decoder.feed(data):
                if isinstance(message, StartEncoder):
                    if not message.folder:
                        return 1
                    if message.folder != "ready":
                        wire.sendall(encode_frame(EncoderRejected(message.folder, "no model")))
                        return 1
                    wire.sendall(encode_frame(EncoderReady(1)))
                    continue
                firsts = [unpack_ids(text)[0] for text in message.texts]
                if DIES in firsts:
                    return 1
                if HANGS in firsts:
                    signal.pause()
                pairs = zip(message.texts, firsts, strict=True)
                found = [b"" if first == DAMAGED else text for text, first in pairs]
                wire.sendall(encode_frame(EncodedBatch(message.number, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
