"""Learning with the robot on one computer (``remote_actor``) and the ``learner`` on another."""
