"""What happened on the robot: recorded as MCAP, exported as a data set."""
