"""Where a policy meets an env: collecting, what was collected, replay and seeding."""
