"""Which of several policies to put on a robot, from episodes that were recorded before."""
