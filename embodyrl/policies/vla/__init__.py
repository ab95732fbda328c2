"""LeRobot's flow-matching vision-language-action models (SmolVLA, pi0, pi0.5) as policies."""
