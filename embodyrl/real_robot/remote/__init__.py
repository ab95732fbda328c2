"""Learning with the robot on one computer and the learner on another."""
