"""The policy behind a websocket: server, client, and what they exchange.

The parts with torch are ``checkpoint_policy`` and ``real_time_chunking``.
"""
