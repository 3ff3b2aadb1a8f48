#!/usr/bin/env bash
# Calls the API with curl. SLIPSTREAM_URL is the server's URL, SLIPSTREAM_API_KEY its key.
set -euo pipefail
url=${SLIPSTREAM_URL:-http://127.0.0.1:8000}
call() {
  curl --silent --show-error --fail-with-body --no-buffer \
    --header "Authorization: Bearer ${SLIPSTREAM_API_KEY:-none}" --header 'Content-Type: application/json' "$@"
}

echo "# the models"
call "$url/v1/models"

echo; echo "# a chat with a single response"
call "$url/v1/chat/completions" --data '{
  "model": "smollm2-135m",
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "temperature": 0,
  "max_tokens": 40
}'

echo; echo "# the same chat as a stream, with its token usage at the end"
call "$url/v1/chat/completions" --data '{
  "model": "smollm2-135m",
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "temperature": 0,
  "max_tokens": 40,
  "stream": true,
  "stream_options": {"include_usage": true}
}'

echo "# a completion with the three most likely tokens at each position"
call "$url/v1/completions" --data '{
  "model": "smollm2-135m",
  "prompt": "1, 2, 3, 4,",
  "temperature": 0,
  "max_tokens": 6,
  "logprobs": 3
}'

echo; echo "# a reply that follows a JSON schema"
call "$url/v1/chat/completions" --data '{
  "model": "smollm2-135m",
  "messages": [{"role": "user", "content": "Name a city and its country."}],
  "temperature": 0,
  "max_tokens": 80,
  "response_format": {
    "type": "json_schema",
    "json_schema": {
      "name": "city",
      "strict": true,
      "schema": {
        "type": "object",
        "properties": {
          "city": {"type": "string", "maxLength": 30},
          "country": {"enum": ["France", "Japan", "Peru"]}
        },
        "required": ["city", "country"],
        "additionalProperties": false
      }
    }
  }
}'
