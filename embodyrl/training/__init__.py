"""The training run: its loop, evaluation, folder and checkpoints' way to the hub."""
