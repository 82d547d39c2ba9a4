#!/bin/sh
# The API without an SDK. Start the server with `make serve`, then: sh examples/curl.sh
# TRUNKLINE_URL and TRUNKLINE_KEY_FILE point it elsewhere.
set -eu
url=${TRUNKLINE_URL:-http://127.0.0.1:8080/v1}
key=$(cat "${TRUNKLINE_KEY_FILE:-data/default.key}")

ask() {
    path=$1
    shift
    curl --silent --show-error --fail-with-body --no-buffer "$url/$path" \
        -H "Authorization: Bearer $key" -H 'Content-Type: application/json' "$@"
    echo
}

echo '# models'
ask models

echo '# one answer in one piece'
ask chat/completions -d '{
    "model": "smollm2-135m-instruct", "temperature": 0, "max_tokens": 16,
    "messages": [{"role": "user", "content": "What is the capital of France?"}]}'

echo '# the same as a stream, with usage at the end: the prompt is read from the cache'
ask chat/completions -d '{
    "model": "smollm2-135m-instruct", "temperature": 0, "max_tokens": 16,
    "stream": true, "stream_options": {"include_usage": true},
    "messages": [{"role": "user", "content": "What is the capital of France?"}]}'

echo '# two continuations of one prompt; they share its KV blocks'
ask completions -d '{
    "model": "smollm2-135m-instruct", "prompt": "Once upon a time", "n": 2,
    "max_tokens": 8, "seed": 7}'
