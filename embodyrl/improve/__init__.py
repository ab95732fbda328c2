"""``embodyrl improve``: a robot policy that gets better by being helped, in rounds."""
