"""From an action to the arm, and when to stop: chunk executor, safety filter, tracking, ticker. No torch."""
