"""The worker side: the wire to the server, the scheduler, the KV cache and the model runner.

It knows nothing about HTTP or text.
"""
