"""Environments over HTTP: a server for any environment, and environments whose episodes run on a server."""
