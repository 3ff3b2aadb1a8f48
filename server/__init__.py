"""The HTTP server process: OpenAI API, text, metrics, commands. Never imports torch."""
