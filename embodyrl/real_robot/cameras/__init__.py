"""Cameras that a robot's file names: a thread keeps the newest picture of each.

``camera`` has what they share, ``config`` their settings, and one file each the kinds.
"""
