"""Environments over HTTP: a server for any environment, and the clients that make one elsewhere look like
one of ours.
"""
