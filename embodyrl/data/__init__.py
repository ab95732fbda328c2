"""Demonstrations: collected from scripted experts, kept as LeRobotDataset v3, served as action chunks."""
