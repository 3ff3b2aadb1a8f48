"""Calls the API with OpenAI's Python SDK: `pip install openai`.

SLIPSTREAM_URL is the server's URL, SLIPSTREAM_API_KEY its key.
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SLIPSTREAM_API_KEY", "none"),
)
model = client.models.list().data[0].id

# A chat with a single response.
reply = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    max_tokens=40,
)
print(reply.choices[0].message.content)

# A stream. With `-sc ngram`, drafts also come from `prediction`, text that the reply will repeat.
code = "def area(width, height):\n    return width * height\n"
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": f"Repeat this code exactly:\n```python\n{code}```"}],
    prediction={"type": "content", "content": code},
    temperature=0,
    max_tokens=60,
    stream=True,
    stream_options={"include_usage": True},
)
usage = None
for chunk in stream:
    usage = chunk.usage or usage
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
assert usage is not None and usage.completion_tokens_details is not None
print("predicted tokens accepted:", usage.completion_tokens_details.accepted_prediction_tokens)

# Speculation makes the reply faster and does not change it; a request can turn it off.
plain = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    max_tokens=40,
    extra_body={"speculative": {"enabled": False}},
)
print("the same without speculation:", plain.choices[0].message == reply.choices[0].message)
