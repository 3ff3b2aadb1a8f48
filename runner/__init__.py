"""The worker process: scheduler, KV blocks, model runner. Knows nothing about HTTP or text."""
