"""What the scripted expert can do; ``plan`` says what a skill is, and a file shows each kind."""
