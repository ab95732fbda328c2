"""More than one machine: rollouts in Ray's actors, and training under torchrun (FSDP2)."""
