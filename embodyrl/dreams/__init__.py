"""World models beside the real env: measured, driven by a person, and improved in a loop."""
