"""More than one process: rollouts in shards, in Ray's actors where asked for. Nothing else knows of Ray."""
