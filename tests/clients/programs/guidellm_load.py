"""GuideLLM: its check of /health, streams with usage in each chunk, and its own counts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import KEY, MODEL, URL, case, main

REQUESTS = 3


@case("synchronous streams of chat, with its check of /health")
def synchronous() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data, report = Path(folder) / "prompts.jsonl", Path(folder) / "report.json"
        line = {"prompt": "Tell me about the sea", "output_tokens_count": 8}
        data.write_text(f"{json.dumps(line)}\n" * (REQUESTS + 1))
        command = [str(Path(sys.executable).parent / "guidellm"), "run"]
        command += ["--backend", f"kind=openai_http,target={URL},model={MODEL},api_key={KEY}"]
        command += ["--profile", "kind=synchronous"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--data", f"kind=json_file,path={data}", "--disable-console"]
        command += ["--output", f"kind=json,path={report}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-400:]
        requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
        assert len(requests["successful"]) == REQUESTS, requests["errored"]
        assert all(one["output_tokens"] == 8 for one in requests["successful"])


main("guidellm")
