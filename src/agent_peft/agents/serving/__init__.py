"""Policies on the wire: a server that any OpenAI-compatible client can talk to."""
