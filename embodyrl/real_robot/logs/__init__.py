"""What happened on the robot: recorded as MCAP by ``mcap_log``, made a data set by ``export``."""
