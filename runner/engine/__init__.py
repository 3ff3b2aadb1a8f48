"""The engine and the worker process: requests in, steps in order, results out."""
