"""What is written to disk and read again: checkpoints, metrics, provenance, folder locks."""
