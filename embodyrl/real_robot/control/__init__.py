"""The control loop of the arm, without torch.

``ticker`` is the loop: policy -> ``executor`` -> ``actions`` -> ``safety`` -> robot. ``robot``,
``clocks`` and ``operator`` are the interfaces that the other rooms implement.
"""
