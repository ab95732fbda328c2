"""Arms that LeRobot, or a plug-in of its, knows: ``--robot lerobot``."""
