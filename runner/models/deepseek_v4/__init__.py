"""DeepSeek V4: attention over raw and compressed rows, hyper-connections, experts by token id."""
