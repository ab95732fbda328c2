"""A learned video world model behind the env API, and the reflectors that judge what it shows."""
