"""A Franka on a table in MuJoCo: language-conditioned manipulation tasks whose physics and pixels fly on two CPU cores."""
