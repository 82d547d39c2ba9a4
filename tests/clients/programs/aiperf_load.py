"""aiperf: streams of chat, with a tokenizer of bytes, because it fetches none here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import KEY, MODEL, URL, case, main
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

REQUESTS = 4


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate([*alphabet, "<end>"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", bos_token="<end>")
    fast.save_pretrained(folder)


@case("streams of chat, two at once")
def streams() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, results = Path(folder) / "tokenizer", Path(folder) / "results"
        save_tokenizer(tokenizer)
        command = [str(Path(sys.executable).parent / "aiperf"), "profile", "--model", MODEL]
        command += ["--url", URL, "--api-key", KEY, "--endpoint-type", "chat", "--streaming"]
        command += ["--tokenizer", str(tokenizer), "--request-count", str(REQUESTS)]
        command += ["--concurrency", "2", "--synthetic-input-tokens-mean", "64"]
        command += ["--output-tokens-mean", "8", "--artifact-dir", str(results), "--ui", "none"]
        environment = {name: v for name, v in os.environ.items() if name != "HF_HUB_OFFLINE"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-400:]
        report = json.loads(next(results.rglob("profile_export_aiperf.json")).read_text())
        assert report["request_count"]["avg"] == REQUESTS, report["request_count"]
        assert report["time_to_first_token"]["avg"] > 0


main("aiperf")
