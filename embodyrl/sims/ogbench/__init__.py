"""OGBench's manipulation envs (Park et al. 2025, arXiv:2410.20092) behind the env API."""
