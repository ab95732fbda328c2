"""Reflectors: from camera frames and an instruction to the probability that the task is solved."""
