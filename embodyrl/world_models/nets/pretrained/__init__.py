"""Pretrained video models as the networks of a world model: Wan and AnyFlow."""
