"""Learned video world models, and the reflectors that judge what they imagine."""
