"""A point that moves to a goal in a plane."""
