"""The encoder's process over a socket pair, without starting one; and its messages."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.encoder.bert import BertEncoder, load_tensors
from engine.encoder.card import EncoderCard
from engine.encoder.process import encode_batch, serve
from engine.encoder.protocol import (
    EncodeBatch,
    EncodedBatch,
    EncoderReady,
    EncoderRejected,
    FromEncoder,
    StartEncoder,
    ToEncoder,
    pack_ids,
    read_from_encoder,
    unpack_ids,
)
from engine.encoder.text_parts import EncoderThreads
from engine.wire import Decoder, encode_frame
from tests.encoders import prepared_encoder

TEXTS = [[2, 4, 5, 3], [2, 3], [2, 6, 7, 8, 3]]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> EncoderCard:
    return prepared_encoder(tmp_path_factory.mktemp("encoder"))


class Served:
    """`serve` in a thread, and the gateway's end of its socket."""

    def __init__(self) -> None:
        self._wire, theirs = socket.socketpair()
        self._wire.settimeout(60)
        self._decoder = Decoder(read_from_encoder)
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run, args=(theirs,))
        self._thread.start()

    def _run(self, wire: socket.socket) -> None:
        with wire:
            self.status = serve(wire)

    def ask(self, message: ToEncoder) -> FromEncoder:
        """Send a message; return the one answer."""
        self._wire.sendall(encode_frame(message))
        while True:
            for answer in self._decoder.feed(self._wire.recv(2**16)):
                return answer

    def end(self) -> int | None:
        """Close the gateway's end; return the exit status."""
        self._wire.close()
        self._thread.join(60)
        return self.status


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.end()


def test_answers_batches_in_order_until_the_gateway_leaves(
    served: Served, card: EncoderCard
) -> None:
    """The vectors are those of the model, in the order of the texts."""
    expected = BertEncoder(card, load_tensors(card)).encode(TEXTS)

    ready = served.ask(StartEncoder(card.folder, 0))
    first = served.ask(EncodeBatch(7, [pack_ids(text) for text in TEXTS]))
    second = served.ask(EncodeBatch(8, [pack_ids(TEXTS[1])]))

    assert ready == EncoderReady(32)
    assert isinstance(first, EncodedBatch)
    assert isinstance(second, EncodedBatch)
    assert (first.number, second.number) == (7, 8)
    found = torch.stack(
        [torch.frombuffer(bytearray(one), dtype=torch.float32) for one in first.vectors]
    )
    assert torch.allclose(found, expected, atol=1e-6)
    assert served.end() == 0


def test_refuses_a_model_that_it_cannot_load(served: Served, tmp_path: Path) -> None:
    """With the error's words, since another start would not cure it."""
    answer = served.ask(StartEncoder(str(tmp_path), 0))

    assert isinstance(answer, EncoderRejected)
    assert answer.code == "not_found"
    assert served.end() == 1


def test_packed_ids_are_read_as_they_were() -> None:
    """Four bytes each: two lists have equal bytes if and only if they are equal."""
    assert list(unpack_ids(pack_ids([0, 1, 2**32 - 1]))) == [0, 1, 2**32 - 1]
    assert pack_ids([1, 2]) != pack_ids([2, 1])
    with pytest.raises(OverflowError):
        pack_ids([2**32])


def test_a_vector_that_is_not_finite_is_empty(card: EncoderCard) -> None:
    """One damaged row of the weights; texts without its token have their vectors."""
    tensors = load_tensors(card)
    words = next(name for name in tensors if name.endswith("word_embeddings.weight"))
    tensors = {**tensors, words: tensors[words].clone()}
    tensors[words][7, 0] = float("nan")
    encoder = EncoderThreads(BertEncoder(card, tensors), 1)
    answer = encode_batch(encoder, EncodeBatch(0, [pack_ids(text) for text in TEXTS]))
    encoder.close()

    assert [len(vector) for vector in answer.vectors] == [4 * 32, 4 * 32, 0]
