"""Renders chats with chat templates in a sandbox, without letting clients forge special tokens."""
