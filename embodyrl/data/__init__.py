"""Recorded episodes: collected, kept as LeRobotDataset v3, and served as action chunks."""
