"""World models against the real env: measured, played by a person, and refreshed by what a policy really did."""
