"""Samplers that run beside the session: GPUs and the server's own metrics."""
