"""The engine and its worker process: they take requests in, run steps in order and send outputs."""
