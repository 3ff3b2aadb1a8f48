"""An OpenAI-compatible inference server built for speculative decoding."""

__version__ = "0.1.0"
