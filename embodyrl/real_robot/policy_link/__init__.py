"""The policy behind a socket: server, client and codec."""
