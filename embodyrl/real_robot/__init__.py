"""Checkpoints on a robot: safety filter, chunk executor, policy server and client, transports.

Everything here but ``policy_link.checkpoint_server`` runs on the robot's computer and imports no
torch.
"""
