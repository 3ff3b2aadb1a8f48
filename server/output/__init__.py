"""What a reply may contain, and its split into content, reasoning and tool calls."""
