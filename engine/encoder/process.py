"""The encoder process: `python -m engine.encoder.process`, started by a gateway.

Its standard input is a socket (`engine.encoder.protocol`). The first message names the prepared
folder; then batches come in and vectors leave, in order. One thread, and those that compute. It
exits when the gateway closes its end, and stores nothing; its log line has no text.
`gateway.embeddings.encoder_client` is the other end.
"""

from __future__ import annotations

import gc
import socket
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from engine.encoder.card import load_encoder_card
from engine.encoder.protocol import (
    EncodeBatch,
    EncodedBatch,
    EncoderReady,
    EncoderRejected,
    StartEncoder,
    read_to_encoder,
    unpack_ids,
)
from engine.errors import ModelError
from engine.processes import end_with_parent, run_child
from engine.wire import receive, send

if TYPE_CHECKING:
    from engine.encoder.text_parts import EncoderThreads


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
        for frame in chain.from_iterable(receive(wire)):
            message = read_to_encoder(frame)
            if isinstance(message, StartEncoder):
                gc.disable()  # collections took a tenth of importing torch, and its objects stay
                try:
                    encoder = load(message)
                except ModelError as error:
                    send(wire, EncoderRejected(error.code, error.message))
                    return 1
                finally:
                    gc.freeze()
                    gc.enable()
                send(wire, EncoderReady(encoder.encoder.card.dimensions))
                continue
            assert encoder is not None, "the first message is StartEncoder"
            send(wire, encode_batch(encoder, message))
    finally:
        if encoder is not None:
            encoder.close()
    return 0


def main() -> int:
    """Serve the gateway that started this process."""
    end_with_parent(sys.stdin.fileno())
    return run_child("encoder", serve)


if __name__ == "__main__":
    sys.exit(main())
