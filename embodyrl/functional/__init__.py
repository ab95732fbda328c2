"""The maths: pure functions of tensors and numbers, each tested against a closed form."""
