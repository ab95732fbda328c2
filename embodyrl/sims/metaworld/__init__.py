"""MetaWorld (Yu et al. 2019, arXiv:1910.10897; version 3, McLean et al. 2025) behind the env API."""
