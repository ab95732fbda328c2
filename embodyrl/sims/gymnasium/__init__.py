"""Gymnasium's continuous control from states: MuJoCo's Hopper, HalfCheetah, Walker2d and others."""
