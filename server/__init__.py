"""The HTTP server process: OpenAI's API, text processing, metrics, commands. No torch."""
