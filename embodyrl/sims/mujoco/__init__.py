"""A Franka on a table in MuJoCo: tasks with instructions, fast enough for a CPU."""
