"""Runs policies on a robot, behind a safety filter.

- ``commands``, ``cli``: ``embodyrl serve``, ``deploy``, ``act`` and ``twin``.
- ``control``: the control loop, from an action to a safe command.
- ``policy_link``: the policy server, its client, and what they exchange.
- ``cameras``, ``grippers``: devices beside an arm.
- ``ros``, ``libfranka``, ``twin``: robots that can be driven; the twin is a simulated one.
- ``operator``: the person beside the robot.
- ``logs``: what happened, recorded and exported.
- ``env``, ``remote``: reinforcement learning on the robot.

``control``, ``cameras``, ``grippers``, ``operator``, ``ros``, ``libfranka``, the policy client and the
logs run on the robot's computer and import no torch.
"""
