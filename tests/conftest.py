"""Settings for every test: one thread per process, no screen, no network."""

from __future__ import annotations

import os

# Set before anything imports torch or MuJoCo, and inherited by worker processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "agg")
