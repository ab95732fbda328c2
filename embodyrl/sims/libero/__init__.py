"""LIBERO and LIBERO-PRO: 130 tasks and their perturbed variants (extra ``libero``)."""
