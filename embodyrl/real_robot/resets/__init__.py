"""Between two episodes: the scene is brought back without a person, within a bound."""
