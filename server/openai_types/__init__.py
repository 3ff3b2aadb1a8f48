"""The shapes of OpenAI's API: request bodies as pydantic models, replies as msgspec structs."""
