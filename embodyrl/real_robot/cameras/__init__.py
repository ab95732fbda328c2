"""Cameras that a robot's file names: a thread keeps the newest picture of each.

``camera`` has what they share, ``config`` their settings, ``open_camera`` the table of kinds.
"""
