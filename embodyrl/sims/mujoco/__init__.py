"""A Franka on a table in MuJoCo: language-conditioned tasks whose physics and pixels fly on two CPU cores."""
