"""Serving: a server that any OpenAI-compatible client can talk to."""
