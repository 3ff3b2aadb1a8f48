"""Constraints on replies, and their split into content, reasoning and tool calls."""
