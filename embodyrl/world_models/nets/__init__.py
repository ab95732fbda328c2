"""The networks of a world model, each saved in diffusers' format."""
