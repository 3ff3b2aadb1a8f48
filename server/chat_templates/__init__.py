"""Renders chats with the model's template, safely."""
