"""Calls the API with LangChain: `pip install langchain-openai`.

SLIPSTREAM_URL is the server's URL, SLIPSTREAM_API_KEY its key.
"""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

model = ChatOpenAI(
    model="smollm2-135m",
    base_url=os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=SecretStr(os.environ.get("SLIPSTREAM_API_KEY", "none")),
    temperature=0,
    max_completion_tokens=40,
)
prompt = ChatPromptTemplate.from_messages(
    [("system", "You are a helpful assistant."), ("user", "What is the capital of {country}?")]
)
chain = prompt | model | StrOutputParser()

print(chain.invoke({"country": "France"}))
for piece in chain.stream({"country": "France"}):
    print(piece, end="", flush=True)
print()
