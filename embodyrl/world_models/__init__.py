<<<<<<< HEAD
"""Learned video world models, and the reflectors that judge what they imagine."""
=======
"""A learned video world model behind the env API, and the reflectors that judge what it shows."""
>>>>>>> bdd96e0 (World model: codec, chunk transformer, success head, training, env, measures (work in progress))
